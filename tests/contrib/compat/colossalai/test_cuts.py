"""The policies of ColossalAI, by figures that its own code gives."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpipe.contrib.compat.colossalai.pipeline.pipelinable import boundaries
from fleetpipe.errors import PartitionError

#: Of ResNet-50: conv1, bn1, relu, maxpool, layer1 to layer4, avgpool, fc with 1000 classes.
RESNET50 = [9408, 128, 0, 0, 215808, 1219584, 7098368, 14964736, 0, 2049000]


def cut(policy: Any, weights: list[int], ranks: int, chunks: int = 1, splits: Any = ()) -> Any:
    stages = list(pairwise(boundaries(policy, weights, splits, ranks, chunks)))
    return {rank: stages[rank::ranks] for rank in range(ranks)}


@pytest.mark.parametrize(
    ("count", "ranks", "chunks", "expected"),
    [
        (10, 2, 1, {0: [(0, 5)], 1: [(5, 10)]}),
        (7, 3, 1, {0: [(0, 2)], 1: [(2, 4)], 2: [(4, 7)]}),
        (12, 2, 2, {0: [(0, 3), (6, 9)], 1: [(3, 6), (9, 12)]}),
        # Cut into 4 stages at once it would be 2, 2, 3, 3.
        (10, 2, 2, {0: [(0, 2), (5, 7)], 1: [(2, 5), (7, 10)]}),
    ],
)
def test_uniform(count: int, ranks: int, chunks: int, expected: Any) -> None:
    assert cut("uniform", [1] * count, ranks, chunks) == expected


def test_the_tutorials_own_example_of_chunks() -> None:
    # "device 1 has layer 1,2,9,10; device 2 has layer 3,4,11,12", counted from 1.
    parts = cut("uniform", [1] * 16, 4, 2)
    assert parts[0] == [(0, 2), (8, 10)]
    assert parts[1] == [(2, 4), (10, 12)]


def test_balanced_cuts_resnet_50_where_colossalai_does() -> None:
    assert cut("balanced", RESNET50, 2) == {0: [(0, 7)], 1: [(7, 10)]}
    heaviest = max(sum(RESNET50[slice(*part)]) for [part] in cut("balanced", RESNET50, 4).values())
    assert heaviest == 14964736


@given(st.lists(st.integers(0, 50), min_size=4, max_size=9), st.integers(1, 4))
def test_balanced_is_as_light_as_any_cut(weights: list[int], ranks: int) -> None:
    counted = [max(weight, 1) for weight in weights]

    def heaviest(bounds: tuple[int, ...]) -> int:
        return max(sum(counted[a:b]) for a, b in pairwise(bounds))

    every = combinations(range(1, len(weights)), ranks - 1)
    best = min(heaviest((0, *inner, len(weights))) for inner in every)
    assert heaviest(tuple(boundaries("balanced", weights, (), ranks, 1))) == best


def test_customized_cuts_at_the_marks() -> None:
    assert cut("customized", [1] * 5, 2, splits=(2,)) == {0: [(0, 2)], 1: [(2, 5)]}
    assert cut("customized", [1] * 5, 2, 2, (1, 2, 3)) == {
        0: [(0, 1), (2, 3)],
        1: [(1, 2), (3, 5)],
    }


def test_a_mapping_is_taken_as_it_is() -> None:
    policy = {0: [(0, 1), (3, 4)], 1: [(1, 3), (4, 6)]}
    assert cut(policy, [1] * 6, 2, 2) == policy


@pytest.mark.parametrize(
    ("policy", "chunks", "splits", "words"),
    [
        ("uniform", 4, (), "cannot cut 6 layers into 4 equal chunks"),
        ("balanced", 1, (3,), "the policy is not 'customized'"),
        ({0: [(0, 3)]}, 1, (), "does not give each rank its chunks"),
        ({0: [(0, 3)], 1: [(3, 6)], 2: [(6, 6)]}, 1, (), "does not give each rank its chunks"),
        ({0: [(0, 3)], 1: [(4, 6)]}, 1, (), "begins with layer 3"),
        ({0: [(0, 3)], 1: [(2, 6)]}, 1, (), "begins with layer 3"),
        ("balanced", 4, (), "6 layers cannot fill 8 stages"),
    ],
)
def test_what_is_no_cut_is_refused(policy: Any, chunks: int, splits: Any, words: str) -> None:
    with pytest.raises(PartitionError, match=words):
        cut(policy, [1] * 6, 2, chunks, splits)
