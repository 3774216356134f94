"""Collective operations of ranks that are threads, over real sockets, and of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import paddle
import pytest

from fleetpipe.errors import TransportError
from fleetpipe.mesh.groups import DirectGroup, SoleGroup
from fleetpipe.transport import MessageKey, View
from tests.transport.helpers import LIMIT, join_all

RANKS = 3
OnAll = Callable[[Callable[[DirectGroup], Any]], "list[Any]"]


@pytest.fixture
def on_all() -> Iterator[OnAll]:
    """Runs a function with the group of each rank, all at once."""
    transports = join_all(RANKS)
    with ThreadPoolExecutor(RANKS) as threads:
        yield lambda run: list(threads.map(run, [DirectGroup(t, LIMIT) for t in transports]))
    for transport in transports:
        transport.close()


def test_groups_of_one_mesh_do_not_take_each_others_messages(on_all: OnAll) -> None:
    """Each member of two groups speaks first in another of them; some wait in both at once."""
    members = {"tail": (1, 2), "all": (2, 0, 1), "others": (2, 1)}

    def views(whole: DirectGroup) -> dict[str, Any]:
        rank = whole.rank
        own = {
            name: DirectGroup(View(whole.transport, ranks), LIMIT, name)
            for name, ranks in members.items()
            if rank in ranks
        }
        # What is of one name comes in order, what is of others in any.
        for name in own if rank == 1 else reversed(own):
            group = own[name]
            for peer in set(range(group.ranks)) - {group.rank}:
                group.transport.send(peer, group._gather, f"{name} of {rank}")
        return {
            name: [group._received(p) for p in range(group.ranks) if p != group.rank]
            for name, group in own.items()
        }

    for rank, found in enumerate(on_all(views)):
        assert found == {
            name: [f"{name} of {other}" for other in ranks if other != rank]
            for name, ranks in members.items()
            if rank in ranks
        }


def test_a_view_refuses_who_is_no_member(on_all: OnAll) -> None:
    def refused(whole: DirectGroup) -> bool:
        if whole.rank == 1:
            return True
        view = View(whole.transport, (2, 0))
        with pytest.raises(TransportError, match="has no connection to rank 2"):
            view.send(2, MessageKey("C", 0, 0, "", 0), None)
        return True

    assert on_all(refused) == [True] * RANKS


def test_values_go_from_one_to_all_and_from_all_to_all(on_all: OnAll) -> None:
    assert on_all(lambda group: group.broadcast(("from", group.rank), 1)) == [("from", 1)] * RANKS
    assert on_all(lambda group: group.all_gather(group.rank)) == [[0, 1, 2]] * RANKS


def test_sums_have_the_same_bits_on_all(on_all: OnAll) -> None:
    def total(group: DirectGroup) -> bytes:
        tensor = paddle.full([2], [0.1, 1e8, -1e8][group.rank])
        group.all_reduce([tensor])
        return bytes(tensor.numpy().tobytes())

    in_order = paddle.full([2], 0.1) + paddle.full([2], 1e8) + paddle.full([2], -1e8)
    assert on_all(total) == [in_order.numpy().tobytes()] * RANKS


def test_each_tensor_comes_from_the_member_named_beside_it(on_all: OnAll) -> None:
    def values(group: DirectGroup) -> list[float]:
        tensors = [paddle.full([1], 10.0 * group.rank + number) for number in range(3)]
        sources = [2, 0, 2]
        kept = [tensor.detach() for tensor in tensors]
        group.broadcast_each(list(zip(tensors, sources)))
        # In place: whoever holds the tensor already has the value.
        assert [view.item() for view in kept] == [tensor.item() for tensor in tensors]
        return [tensor.item() for tensor in tensors]

    assert on_all(values) == [[20.0, 1.0, 22.0]] * RANKS


def test_one_process_has_what_everyone_has() -> None:
    group, tensor = SoleGroup(), paddle.full([1], 3.0)
    group.all_reduce([tensor])
    group.broadcast_each([(tensor, 0)])
    assert tensor.item() == 3.0
    assert group.broadcast("value", 0) == "value"
    assert group.all_gather("value") == ["value"]
