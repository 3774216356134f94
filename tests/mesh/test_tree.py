"""Sums by a tree: the rule, and that ranks which hold branches of it come to the same sum."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpipe.errors import ConfigError
from fleetpipe.mesh.axes import Degrees
from fleetpipe.mesh.sums import TreeSum, count_blocks, tree


def bracketed(values: list[str]) -> str:
    return tree(values, lambda left, right: f"({left}+{right})")


@pytest.mark.parametrize(
    ("count", "total"),
    [
        (1, "0"),
        (2, "(0+1)"),
        (3, "((0+1)+2)"),
        (4, "((0+1)+(2+3))"),
        (6, "(((0+1)+2)+((3+4)+5))"),
        (8, "(((0+1)+(2+3))+((4+5)+(6+7)))"),
    ],
)
def test_a_tree_adds_blocks_and_then_pairs_of_them(count: int, total: str) -> None:
    assert bracketed([*map(str, range(count))]) == total


@given(odd=st.integers(0, 5), levels=st.integers(0, 5), data=st.data())
def test_ranks_with_equal_parts_come_to_the_sum_of_one(
    odd: int, levels: int, data: st.DataObject
) -> None:
    count = (2 * odd + 1) << levels
    assert count_blocks(count) == 1 << levels
    ranks = 1 << data.draw(st.integers(0, levels))
    values, share = [*map(str, range(count))], count // ranks
    parts = [bracketed(values[rank * share : (rank + 1) * share]) for rank in range(ranks)]
    assert bracketed(parts) == bracketed(values)


@given(count=st.integers(1, 200))
def test_a_tree_holds_a_branch_for_each_of_its_levels_at_most(count: int) -> None:
    total = TreeSum[int](count, int.__add__)
    for value in range(count):
        total.add(value)
        assert len(total._branches) <= count_blocks(count).bit_length()
    assert total.total() == sum(range(count))


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        ({"dp": 3}, r"dp_degree \(=3\) must be a power of two.*dp_degree=2"),
        ({"sharding": 6}, "sharding_degree=4"),
        ({"mp": 5}, "mp_degree=4"),
        ({"sep": 2}, "sep_degree=1"),
        ({"cp": 2}, "parts of attention"),
        ({"ep": 2, "dp": 2}, "experts"),
    ],
)
def test_degrees_without_whole_branches_are_refused(degrees: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match="(?s)" + words):
        Degrees(**degrees).require_tree(dynamic=True, device="cpu")


def test_a_static_program_and_layers_cut_on_a_gpu_have_no_tree() -> None:
    with pytest.raises(ConfigError, match="dynamic graph"):
        Degrees().require_tree(dynamic=False, device="cpu")
    Degrees(dp=2).require_tree(dynamic=True, device="gpu")
    with pytest.raises(ConfigError, match=r"(?s)mp_degree \(=2\) on a gpu.*mp_degree=1"):
        Degrees(mp=2).require_tree(dynamic=True, device="gpu")
