"""The cut of the fastest slowest stage, against all cuts."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpipe.errors import PartitionError
from fleetpipe.partition import balanced, fastest
from fleetpipe.partition.slowest import SLACK


@given(
    st.lists(st.integers(0, 9), min_size=4, max_size=9),
    st.lists(st.integers(0, 9), min_size=9, max_size=9),
    st.integers(1, 4),
    st.data(),
)
def test_no_other_cut_has_a_faster_slowest_stage(
    weights: list[int], entering: list[int], parts: int, data: st.DataObject
) -> None:
    """A stage costs its layers, and what enters it; one cannot be longer than five layers."""
    count = len(weights)
    places = sorted(data.draw(st.sets(st.integers(1, count - 1), min_size=parts - 1)))

    def cost(stage: int, start: int, end: int) -> float:
        return math.inf if end - start > 5 else sum(weights[start:end]) + stage * entering[start]

    def costs(inner: tuple[int, ...]) -> tuple[float, float]:
        bounds = (0, *inner, count)
        stages = [cost(s, *pair) for s, pair in enumerate(zip(bounds, bounds[1:]))]
        return max(stages), sum(one**2 for one in stages)

    every = [costs(inner) for inner in itertools.combinations(places, parts - 1)]
    best = min(every)
    if math.isinf(best[0]):
        with pytest.raises(PartitionError, match="fit into memory"):
            fastest(places, count, parts, cost)
        return
    found = fastest(places, count, parts, cost)
    assert found.cost == best[0]
    assert costs(found.boundaries[1:-1]) == best
    assert found == fastest(places, count, parts, cost, lambda *pair: sum(weights[slice(*pair)]))


@given(st.lists(st.integers(0, 9), min_size=3, max_size=12), st.integers(1, 3))
def test_sums_alone_give_the_balanced_cut(weights: list[int], parts: int) -> None:
    places = range(1, len(weights))
    found = fastest(places, len(weights), parts, lambda _, start, end: sum(weights[start:end]))
    assert list(found.boundaries) == balanced(weights, parts)


@given(
    st.lists(st.integers(1, 99), min_size=4, max_size=9),
    st.lists(st.integers(0, 9), min_size=9, max_size=9),
    st.integers(1, 4),
)
def test_of_cuts_that_are_nearly_as_fast_it_is_the_one_that_sends_least(
    weights: list[int], sizes: list[int], parts: int
) -> None:
    count = len(weights)

    def cost(_: int, start: int, end: int) -> float:
        return sum(weights[start:end])

    def sent(start: int) -> int:
        return sizes[start] if start else 0

    every: dict[tuple[int, ...], float] = {}
    for inner in itertools.combinations(range(1, count), parts - 1):
        bounds = (0, *inner, count)
        every[bounds] = max(cost(0, *pair) for pair in zip(bounds, bounds[1:]))
    most = (1 + SLACK) * min(every.values())
    near = [bounds for bounds, slowest in every.items() if slowest <= most]
    found = fastest(range(1, count), count, parts, cost, sent=sent)
    assert found.cost == every[found.boundaries] <= most
    # Of these the latest, the last border first.
    assert found.boundaries == min(
        near, key=lambda b: (sum(map(sent, b[:-1])), [-x for x in b[::-1]])
    )
    floored = fastest(range(1, count), count, parts, cost, lambda *pair: cost(0, *pair), sent)
    assert floored == found


def test_too_few_places_are_refused() -> None:
    with pytest.raises(PartitionError, match="4 stages need 3 places"):
        fastest([2], 5, 4, lambda *_: 1.0)
