"""The values of the first rank, on all."""

from __future__ import annotations

from typing import Any

import paddle

from fleetpipe.dygraph.broadcast import broadcast_state
from tests.groups import members, on_all


def test_all_have_what_the_first_has_and_what_is_sent_is_a_copy() -> None:
    group = members(2)
    sent: list[Any] = []

    def run(rank: int) -> tuple[list[float], float]:
        state = {"whole": paddle.full([2], rank + 1.0), "number": paddle.full([], rank + 5.0)}
        member: Any = group[rank]
        broadcast = member.broadcast

        def noting(value: Any, source: int) -> Any:
            sent.append((rank, value))
            return broadcast(value, source)

        member.broadcast = noting
        broadcast_state(state, member)
        found = state["whole"].tolist(), float(state["number"])
        state["whole"].set_value(paddle.full([2], -1.0))
        return found

    assert on_all(2, run) == [([1.0, 1.0], 5.0)] * 2
    (first,) = [value for rank, value in sent if rank == 0]
    assert [value for rank, value in sent if rank == 1] == [None]
    assert first["whole"].tolist() == [1.0, 1.0]
