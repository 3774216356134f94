"""Which part of a parameter a rank has, by its own word and by Paddle's marks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleetpipe.errors import CheckpointError
from fleetpipe.mesh import parts
from fleetpipe.mesh.parts import JoinedParts, LocalTensor, PartOfWhole, Region
from tests.groups import members, on_all

ROWS = Region(0, 2, 4, 6)


def parameter(**marks: object) -> Any:
    """A part of two rows of a parameter, [6, 3], or one of two columns of [2, 9]."""
    made: Any = nn.Layer().create_parameter([2, 3])
    for name, mark in marks.items():
        setattr(made, name, mark)
    return made


@pytest.mark.parametrize(
    ("marks", "cut", "axis"),
    [
        ({}, None, ""),
        ({"is_distributed": False, "split_axis": 0}, None, ""),
        ({"is_distributed": True}, None, "mp"),
        ({"is_distributed": True, "split_axis": 0}, ROWS, "mp"),
        ({"is_distributed": True, "split_axis": -1}, Region(1, 3, 6, 9), "mp"),
        ({"part_of_whole": PartOfWhole(1, ROWS)}, ROWS, ""),
        ({"part_of_whole": PartOfWhole(1, ROWS, "rows")}, ROWS, "rows"),
    ],
)
def test_a_parameter_says_which_part_it_is(
    marks: Mapping[str, object], cut: Region | None, axis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "SHARDS", ("mp", "rows"))
    tensor = parameter(**marks)
    part = parts.part_of(tensor, lambda: (1, 3))
    assert (part and part.cut) == cut
    assert parts.shard_axis(tensor) == axis
    assert parts.whole_name("4.weight", tensor) == ("3.weight" if cut and not axis else "4.weight")
    if cut is None and axis:
        with pytest.raises(CheckpointError, match="no split_axis"):
            parts.local_tensor_of(tensor, lambda: (1, 3))
        assert parts.local_tensor_of(tensor, lambda: (0, 1)).cut is None
        return
    held = parts.local_tensor_of(tensor, lambda: (1, 3))
    assert held.described.shape == ((2, 3) if cut is None else cut.whole((2, 3)))
    whole = np.arange(np.prod(held.described.shape)).reshape(held.described.shape)
    name = parts.whole_name("4.weight", tensor)
    found = parts.parted({name: whole, "more": 1}, {"4.weight": tensor}, lambda: (1, 3))
    assert found.keys() == {"4.weight", "more"}
    assert found["4.weight"].shape == (2, 3)
    assert np.array_equal(found["4.weight"], whole if cut is None else cut.taken_from(whole))


def test_parts_of_one_process_are_filled_as_one() -> None:
    halves = [paddle.zeros([2, 3]), paddle.zeros([4, 3])]
    cuts = [Region(0, 2, 4, 8), Region(0, 4, 8, 8)]
    joined = JoinedParts(("weight", LocalTensor(*pair)) for pair in zip(halves, cuts))
    assert joined.tensors["weight"].cut == Region(0, 2, 8, 8)
    values = paddle.arange(18, dtype="float32").reshape([6, 3])
    target: Any = joined.tensors["weight"].tensor
    target.set_value(values)
    joined.hand_out()
    assert np.array_equal(np.concatenate([half.numpy() for half in halves]), values.numpy())


def test_the_first_rank_joins_the_parts_of_all() -> None:
    whole = {"cut": paddle.rand([6, 3]), "uneven": paddle.rand([2, 6]), "same": paddle.rand([4])}
    groups: Any = members(3)

    def join(rank: int) -> dict[str, Any]:
        cuts = {
            "cut": Region(0, 2 * rank, 2 * rank + 2, 6),
            "uneven": Region(1, *((0, 1), (1, 4), (4, 6))[rank], 6),
        }
        held = [(name, LocalTensor(cut.taken_from(whole[name]), cut)) for name, cut in cuts.items()]
        held += [("same", LocalTensor(whole["same"]))] * (rank == 2)
        return parts.joined_on_first(groups[rank], held)

    first, *others = on_all(3, join)
    assert others == [{}, {}]
    assert {name: value.numpy().tobytes() for name, value in first.items()} == {
        name: value.numpy().tobytes() for name, value in whole.items()
    }
