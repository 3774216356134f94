"""The order and the content of transfers that return at once, as NCCL's, with stand-ins."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable

import paddle
import pytest

from fleetpipe.errors import PeerFailed, PipelineTimeout
from fleetpipe.transport import MemoryHub, ProcessGroupTransport
from fleetpipe.transport.lanes import Lane
from tests.fixtures import Patch
from tests.transport.helpers import DTYPES, LIMIT, backward, forward, same, sample

#: What ``phi::ToNCCLDataType`` takes in 2.6.2 and in 3.3.1; it throws at any other dtype.
OF_NCCL = {
    *(paddle.float16, paddle.bfloat16, paddle.float32, paddle.float64),
    *(paddle.int8, paddle.int32, paddle.int64, paddle.uint8, paddle.bool),
}


class Wire:
    """The communicators of a job: a first-in first-out line for each pair and direction."""

    def __init__(self) -> None:
        self.lines: dict[tuple[int, int], deque[paddle.Tensor]] = {}
        self.started: list[tuple[str, int, int]] = []

    def isend(self, rank: int, tensor: paddle.Tensor, peer: int) -> FakeTask:
        assert tensor.is_contiguous()
        assert tensor.dtype in OF_NCCL
        self.started.append(("send", rank, peer))
        line = self.lines.setdefault((rank, peer), deque())
        line.append(tensor)
        return FakeTask(lambda: not any(tensor is waiting for waiting in line))

    def irecv(self, rank: int, tensor: paddle.Tensor, peer: int) -> FakeTask:
        self.started.append(("receive", peer, rank))
        source = self.lines[peer, rank].popleft()
        assert (source.size, source.dtype) == (tensor.size, tensor.dtype)
        nbytes = int(source.size) * source.element_size()
        ctypes.memmove(tensor.data_ptr(), source.data_ptr(), nbytes)
        return FakeTask(lambda: True)


class FakeTask:
    def __init__(self, completed: Callable[[], bool]) -> None:
        self.is_completed = completed

    def wait(self) -> None:
        """Orders what is computed next behind the transfer; this process goes on."""


def ranks(wire: Wire) -> list[ProcessGroupTransport]:
    hub = MemoryHub(2)

    def make(rank: int) -> ProcessGroupTransport:
        sockets, peer = hub.endpoint(rank), 1 - rank
        outgoing = Lane(peer, sockets, lambda tensor: wire.isend(rank, tensor, peer))
        incoming = Lane(peer, sockets, lambda tensor: wire.irecv(rank, tensor, peer))
        return ProcessGroupTransport(sockets, {peer: outgoing}, {peer: incoming}, LIMIT)

    return [make(0), make(1)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_crosses_as_one_that_nccl_takes(dtype: str) -> None:
    one, other = ranks(Wire())
    value = [sample(dtype, shape) for shape in ([], [1], [5], [2, 3], [0], [2, 0, 3])]
    value += [sample(dtype, [9, 4])[5:7], sample(dtype, [3, 4]).transpose([1, 0])]
    value[3].stop_gradient = False
    for k in range(2):
        one.send(1, forward(k), value)
        received = other.receive(0, forward(k), LIMIT)
        assert same(received, value)
        assert all(tensor.is_leaf for tensor in received)
    assert one.announcements == 1


def test_transfers_start_in_the_order_of_the_sends_whatever_is_received_first() -> None:
    wire = Wire()
    one, other = ranks(wire)
    for k in range(3):
        one.send(1, forward(k), sample("float32", [2], seed=k))
    one.send(1, forward(0, 0, 2), sample("float32", [5]))
    assert same(other.receive(0, forward(0, 0, 2), LIMIT), sample("float32", [5]))
    assert wire.started == [("send", 0, 1)] * 4 + [("receive", 0, 1)] * 4
    for k in (2, 0, 1):
        assert same(other.receive(0, forward(k), LIMIT), sample("float32", [2], seed=k))


def test_post_starts_what_has_been_announced() -> None:
    wire = Wire()
    one, other = ranks(wire)
    other.post(0, forward(0))
    assert wire.started == []
    one.send(1, forward(0), sample("float32", [2]))
    other.post(0, forward(0))
    assert wire.started == [("send", 0, 1), ("receive", 0, 1)]
    assert other.try_receive(0, forward(0))[0]


def test_steady_steps_announce_nothing() -> None:
    one, other = ranks(Wire())
    for k in range(4):
        one.send(1, forward(k), sample("float32", [2]))
        other.receive(0, forward(k), LIMIT)
        other.send(0, backward(k), sample("float32", [2]))
        one.receive(1, backward(k), LIMIT)
    one.send(1, forward(4), sample("float32", [3]))
    assert same(other.receive(0, forward(4), LIMIT), sample("float32", [3]))
    assert (one.announcements, one.messages, one.bytes_sent) == (2, 5, 44)
    assert other.announcements == 1


def test_sent_tensors_are_kept_until_they_have_left() -> None:
    one, other = ranks(Wire())
    one.send(1, forward(0), sample("float32", [2]))
    one.send(1, forward(1), sample("float32", [2]))
    assert len(one._outgoing[1]._under_way) == 2
    other.post(0, forward(0))
    one.send(1, forward(2), 1)
    assert len(one._outgoing[1]._under_way) == 0
    one.flush(LIMIT)


def test_what_lies_in_the_hosts_memory_is_sent_from_the_device(
    monkeypatch: Patch,
) -> None:
    wire = Wire()
    one, _ = ranks(wire)
    tensor = sample("int64", [2])
    monkeypatch.setattr(paddle.device, "get_device", lambda: "gpu:0")
    one.send(1, forward(0), tensor)
    (sent,) = wire.lines[0, 1]
    assert same(sent, tensor)
    assert sent.data_ptr() != tensor.data_ptr()


def test_a_flush_ends_when_the_peer_has_everything() -> None:
    wire = Wire()
    one, other = ranks(wire)
    value = sample("float32", [2])
    one.send(1, forward(0), value)
    with pytest.raises(
        PipelineTimeout, match=r"(?s)rank 1 for 0\.05 s.*F of edge 0>1, micro-batch 0"
    ):
        one.flush(0.05)
    begun = threading.Timer(0.1, other.receive, (0, forward(0), LIMIT))
    begun.start()
    one.flush(LIMIT)
    assert not wire.lines[0, 1]
    begun.join()
    one.send(1, forward(1), value)
    threading.Timer(0.1, one.interrupt).start()
    with pytest.raises(PeerFailed, match="a rank of the job failed while this one waited"):
        one.flush(LIMIT)
