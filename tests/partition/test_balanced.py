"""The balanced cut and that of the fastest slowest stage, against all cuts there are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpipe.errors import PartitionError
from fleetpipe.partition import balanced, fastest
from fleetpipe.partition.slowest import SLACK

# Trainable parameters of ResNet-50's children: conv1, bn1, relu, maxpool, layer1 to layer4,
# avgpool, fc.
RESNET50 = [9408, 128, 0, 0, 215808, 1219584, 7098368, 14964736, 0, 2049000]


def loads(weights: Sequence[int], boundaries: Sequence[int]) -> list[int]:
    return [sum(weights[start:end]) for start, end in itertools.pairwise(boundaries)]


def all_cuts(count: int, parts: int) -> Iterator[list[int]]:
    for inner in combinations(range(1, count), parts - 1):
        yield [0, *inner, count]


def best_of_all(weights: Sequence[int], parts: int) -> list[int]:
    """The documented rule, said directly: heaviest stage, then squares, then the latest cuts."""

    def rank(boundaries: list[int]) -> tuple[int, int, list[int]]:
        stages = loads(weights, boundaries)
        return max(stages), sum(load**2 for load in stages), [-cut for cut in boundaries[::-1]]

    return min(all_cuts(len(weights), parts), key=rank)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int]:
    parts = draw(st.integers(1, 4))
    weight = st.one_of(st.just(0), st.integers(0, 8), st.integers(0, 10**12))
    return draw(st.lists(weight, min_size=parts, max_size=12)), parts


@given(problems())
def test_is_the_best_of_all_cuts(problem: tuple[list[int], int]) -> None:
    weights, parts = problem
    assert balanced(weights, parts) == best_of_all(weights, parts)


@pytest.mark.parametrize(
    ("parts", "heaviest"), [(1, 25_557_032), (2, 17_013_736), (3, 14_964_736), (4, 14_964_736)]
)
def test_resnet50_heaviest_stage(parts: int, heaviest: int) -> None:
    assert max(loads(RESNET50, balanced(RESNET50, parts))) == heaviest


def test_resnet50_in_two_is_cut_before_its_last_stage_of_blocks() -> None:
    assert balanced(RESNET50, 2) == [0, 7, 10]


def test_pooling_stays_with_the_layer_before_it() -> None:
    assert balanced(RESNET50, 3) == [0, 7, 9, 10]


def test_stages_that_are_not_the_heaviest_are_even_too() -> None:
    assert balanced([100, 10, 10, 10, 10, 10, 10], 4) == [0, 1, 3, 5, 7]


def test_the_heaviest_stage_counts_before_evenness() -> None:
    assert balanced([2, 3, 5, 1], 3) == [0, 2, 3, 4]  # 5 5 1, though 2 3 6 has smaller squares


def test_layers_that_weigh_nothing_still_fill_stages() -> None:
    assert balanced([0, 0, 0], 3) == [0, 1, 2, 3]
    assert balanced([0, 0, 5, 5, 0], 2) == [0, 3, 5]


def test_large_counts_are_exact() -> None:
    big = 2**60
    assert balanced([big, 1, big + 1], 2) == [0, 2, 3]
    assert balanced([big + 2, 1, big + 1], 2) == [0, 1, 3]


def test_too_few_layers_names_the_empty_stage() -> None:
    with pytest.raises(PartitionError, match="stage 2 would be empty") as caught:
        balanced([1, 2], 3)
    assert "'balanced'" in str(caught.value)


def test_negative_weight_is_refused() -> None:
    with pytest.raises(PartitionError, match="layer 1"):
        balanced([1, -2], 1)


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
        stages = [cost(s, *pair) for s, pair in enumerate(itertools.pairwise(bounds))]
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
        every[bounds] = max(cost(0, *pair) for pair in itertools.pairwise(bounds))
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
