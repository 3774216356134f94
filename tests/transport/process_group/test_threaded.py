"""Transfers that block until the other side has come, as Gloo's, with stand-ins that last 0.3 s."""

from __future__ import annotations

import ctypes
import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import paddle
import pytest

from fleetpipe.errors import BoundaryError, PeerFailed, PipelineTimeout
from fleetpipe.transport import ProcessGroupTransport, SocketTransport
from fleetpipe.transport.lanes import Lane
from tests.fixtures import Patch
from tests.transport.helpers import LIMIT, backward, forward, same, sample

pytestmark = pytest.mark.once

Pair = list[ProcessGroupTransport]
#: Seconds after which a transfer fails whose other side has not come; Gloo's 30.
PATIENCE = 0.3


class Group:
    """One direction: both sides wait for each other, and fail if that takes too long."""

    def __init__(self) -> None:
        self.entered: queue.Queue[paddle.Tensor] = queue.Queue()
        self.left: queue.Queue[None] = queue.Queue()

    def isend(self, tensor: paddle.Tensor) -> Group:
        self.entered.put(tensor)
        try:
            self.left.get(timeout=PATIENCE)
        except queue.Empty:
            raise RuntimeError("timed out waiting for send") from None
        return self

    def irecv(self, tensor: paddle.Tensor) -> Group:
        try:
            source = self.entered.get(timeout=PATIENCE)
        except queue.Empty:
            raise RuntimeError("timed out waiting for recv") from None
        ctypes.memmove(tensor.data_ptr(), source.data_ptr(), source.shape[0])
        self.left.put(None)
        return self

    def wait(self) -> None:
        """The call itself has waited."""


@pytest.fixture
def pair(sockets: Callable[..., list[SocketTransport]]) -> Iterator[list[ProcessGroupTransport]]:
    joined = [sockets(2, namespace=name) for name in ("rest", "0 to 1", "1 to 0")]
    groups = {(0, 1): Group(), (1, 0): Group()}

    def lane(rank: int, source: int) -> Lane:
        stream = joined[1 + source][rank]
        group = groups[source, 1 - source]

        def transfer(tensor: paddle.Tensor) -> Group:
            return group.isend(tensor) if rank == source else group.irecv(tensor)

        return Lane(1 - rank, stream, transfer, stream.interrupt)

    made = [
        ProcessGroupTransport(
            joined[0][rank], {1 - rank: lane(rank, rank)}, {1 - rank: lane(rank, 1 - rank)}, LIMIT
        )
        for rank in (0, 1)
    ]
    yield made
    for transport in made:
        transport.close()


def test_values_arrive_as_they_were_in_any_order(pair: Pair) -> None:
    one, other = pair
    value = {
        "x": [sample("float32", [2, 3]), sample("bfloat16", [4]), sample("bool", [])],
        "empty": paddle.zeros([0, 3]),
        "part": sample("float32", [9, 4])[5:7],
        "view": sample("complex64", [3, 4]).transpose([1, 0]),
        "words": ("with some spaces", 7),
    }
    for k in range(3):
        one.send(1, forward(k), sample("float32", [2], seed=k))
    one.send(1, forward(9), value)
    one.send(1, forward(8), None)
    assert same(other.receive(0, forward(9), LIMIT), value)
    for k in (2, 0, 1):
        assert same(other.receive(0, forward(k), LIMIT), sample("float32", [2], seed=k))
    assert other.receive(0, forward(8), LIMIT) is None
    assert (one.messages, one.announcements) == (5, 3)


def test_neither_a_receiver_nor_a_sender_that_computes_breaks_a_transfer(
    pair: Pair,
) -> None:
    one, other = pair
    one.send(1, forward(0), sample("float32", [2]))
    time.sleep(3 * PATIENCE)
    one.send(1, forward(1), sample("float32", [3]))
    time.sleep(3 * PATIENCE)
    assert same(other.receive(0, forward(0), LIMIT), sample("float32", [2]))
    assert other.try_receive(0, forward(1))[0]


def test_both_may_send_first(pair: Pair) -> None:
    def exchange(rank: int) -> bool:
        mine, keys = pair[rank], (forward, backward)
        for k in range(20):
            mine.send(1 - rank, keys[rank](k), sample("float32", [50_000], seed=k))
        values = [mine.receive(1 - rank, keys[1 - rank](k), LIMIT) for k in range(20)]
        mine.flush(LIMIT)
        return all(same(v, sample("float32", [50_000], seed=k)) for k, v in enumerate(values))

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(exchange, (0, 1))) == [True, True]


def test_what_does_not_come_is_named(pair: Pair) -> None:
    one, other = pair
    assert other.try_receive(0, forward(0)) == (False, None)
    with pytest.raises(PipelineTimeout, match=r"F of edge 0>1, micro-batch 3 from rank 0"):
        other.receive(0, forward(3), 0.1)
    assert other.awaited is None
    with pytest.raises(BoundaryError, match=r"value\[0\]"):
        one.send(1, forward(0), [object()])
    one.send(1, forward(0), sample("float32", [2]))
    one.flush(LIMIT)
    one.close()
    assert same(other.receive(0, forward(0), LIMIT), sample("float32", [2]))
    with pytest.raises(PeerFailed, match="rank 0 has left"):
        other.receive(0, forward(1), LIMIT)


def test_an_interrupt_ends_a_wait(pair: Pair) -> None:
    _, other = pair
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(other.receive, 0, forward(0), LIMIT)
        time.sleep(0.1)
        other.interrupt()
        with pytest.raises(PeerFailed, match="a rank of the job failed while this one waited"):
            waiting.result(LIMIT)
    with pytest.raises(PeerFailed):
        other.send(0, backward(0), sample("float32", [2]))


def test_a_broken_transfer_is_told_at_both_ends(pair: Pair, monkeypatch: Patch) -> None:
    def stop(*_: object) -> None:
        time.sleep(2 * PATIENCE)
        raise RuntimeError("timed out waiting for recv")

    one, other = pair
    monkeypatch.setattr(Group, "irecv", stop)
    one.send(1, forward(0), sample("float32", [2]))
    with pytest.raises(PeerFailed, match="the transfer between this rank and rank 1 broke"):
        one.flush(LIMIT)
    with pytest.raises(PeerFailed, match="F of edge 0>1, micro-batch 0 from rank 0 to rank 1"):
        other.receive(0, forward(0), LIMIT)
