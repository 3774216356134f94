"""The balanced cut against all cuts there are, and against known models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpipe.errors import PartitionError
from fleetpipe.partition import balanced

# Trainable parameters of ResNet-50's children: conv1, bn1, relu, maxpool, layer1 to layer4,
# avgpool, fc.
RESNET50 = [9408, 128, 0, 0, 215808, 1219584, 7098368, 14964736, 0, 2049000]


def loads(weights: Sequence[int], boundaries: Sequence[int]) -> list[int]:
    return [sum(weights[start:end]) for start, end in zip(boundaries, boundaries[1:])]


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
