"""Transports whose messages come late, as over slow networks, or by streams of a device."""

from __future__ import annotations

import ctypes
import time
import weakref
from collections import defaultdict, deque
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.utils import dlpack

from fleetpipe.paddle_api.device import dynamic_mode
from fleetpipe.transport import MemoryHub, MemoryTransport, MessageKey, describe
from fleetpipe.transport.wire import bridge
from fleetpipe.transport.wire.bridge import _import_shares, take_apart
from fleetpipe.transport.wire.structure import Structure
from tests.fixtures import Patch
from tests.transport.helpers import forward, sample


class DelayedTransport:
    """Stands before another transport of processes on one host; both ends have one."""

    def __init__(self, transport: Any, seconds: float) -> None:
        self._transport, self._seconds = transport, seconds
        self._early: dict[tuple[int, MessageKey], list[Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send(self, peer: int, key: MessageKey, value: Any) -> None:
        """Sends a value with the moment of now."""
        self._transport.send(peer, key, (time.monotonic(), value))

    def try_receive(self, peer: int, key: MessageKey) -> tuple[bool, Any]:
        """Takes a value that was sent long enough ago."""
        early = self._early.setdefault((peer, key), [])
        if not early:
            arrived, stamped = self._transport.try_receive(peer, key)
            early += [stamped] * arrived
        if early and time.monotonic() >= early[0][0] + self._seconds:
            return True, early.pop(0)[1]
        return False, None

    def receive(self, peer: int, key: MessageKey, timeout: float) -> Any:
        """Waits until a value was sent long enough ago."""
        early = self._early.setdefault((peer, key), [])
        sent, value = early.pop(0) if early else self._transport.receive(peer, key, timeout)
        time.sleep(max(0.0, sent + self._seconds - time.monotonic()))
        return value


#: Each number of any type of floats whose bytes are these is NaN.
POISON = 0xFF


class Memory:
    """Blocks of bytes, poisoned whenever nobody holds them; the one given back last comes first."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[Any]] = defaultdict(list)
        self.reused = 0
        self.blocks: list[Any] = []

    def tensor(self, nbytes: int) -> paddle.Tensor:
        """A tensor of so many bytes."""
        free = self._free[nbytes]
        self.reused += bool(free)
        if not free:
            self.blocks.append(np.full(nbytes, POISON, "uint8"))
            free.append(self.blocks[-1])
        block = free.pop()
        lent = block[:]
        weakref.finalize(lent, self._take_back, block)
        return dlpack.from_dlpack(lent.__dlpack__())

    def _take_back(self, block: Any) -> None:
        block[:] = POISON
        self._free[block.nbytes].append(block)


class LateHub(MemoryHub):
    """The place where the ranks leave tensors that are read later; see the module."""

    def __init__(self, ranks: int) -> None:
        self.memory = Memory()
        self._endpoints = [LateTransport(self, rank, ranks) for rank in range(ranks)]


class LateTransport(MemoryTransport):
    """One rank's connections inside a `LateHub`."""

    _hub: LateHub

    def __init__(self, hub: LateHub, rank: int, ranks: int) -> None:
        super().__init__(hub, rank, ranks)
        self._digests: dict[tuple[int, MessageKey], deque[list[bytes]]] = {}

    def send(self, peer: int, key: MessageKey, value: Any) -> None:
        """Leaves a value that is read when ``peer`` takes it, and forgets its own handles to it."""
        super().send(peer, key, value)
        digests = self._hub.endpoint(peer)._digests
        digests.setdefault((self.rank, key), deque()).append(contents(value))
        with dynamic_mode():
            for tensor in take_apart(value)[1]:
                # The allocator gives what somebody has freed to whoever asks for as much.
                paddle.full(tensor.shape, float("nan"), "float32")

    def try_receive(self, peer: int, key: MessageKey) -> tuple[bool, Any]:
        """Reads the sender's tensors now, into memory that was NaN until now."""
        arrived, sent = super().try_receive(peer, key)
        if not arrived:
            return False, None
        digests = self._digests[peer, key]
        assert contents(sent) == digests.popleft(), (
            f"{describe(key)} was changed on rank {peer} after it was sent"
        )
        tree, tensors = take_apart(sent)
        structure = Structure(tree)
        sources = bridge.flat_bytes(tensors)
        buffers = [self._hub.memory.tensor(source.shape[0]) for source in sources]
        for buffer, source in zip(buffers, sources):
            ctypes.memmove(buffer.data_ptr(), source.data_ptr(), source.shape[0])
        return True, structure.rebuild(bridge.from_bytes(buffers, structure.leaves))


def contents(value: Any) -> list[bytes]:
    """The bytes of all tensors of a value."""
    flat = bridge.flat_bytes(take_apart(value)[1])
    return [ctypes.string_at(tensor.data_ptr(), tensor.shape[0]) for tensor in flat]


def stand_in(monkeypatch: Patch) -> list[LateHub]:
    """Has jobs of one process go over late transports; returns these as they are made."""
    made: list[LateHub] = []

    def hub(ranks: int) -> LateHub:
        made.append(LateHub(ranks))
        return made[-1]

    monkeypatch.setattr("fleetpipe.transport.memory.MemoryHub", hub)
    return made


def test_a_tensor_that_is_changed_after_it_was_sent_is_named() -> None:
    hub = LateHub(2)
    tensor = sample("float32", [2])
    hub.endpoint(0).send(1, forward(3), tensor)
    tensor.add_(paddle.ones([2]))
    with pytest.raises(AssertionError, match="F of edge 0>1, micro-batch 3 was changed on rank 0"):
        hub.endpoint(1).try_receive(0, forward(3))


@pytest.mark.skipif(not _import_shares(), reason="this Paddle copies the arrays that it is given")
def test_memory_is_poisoned_as_soon_as_nothing_holds_it() -> None:
    hub = LateHub(2)
    hub.endpoint(0).send(1, forward(0), paddle.ones([4]))
    received = hub.endpoint(1).try_receive(0, forward(0))[1]
    view = received.reshape([2, 2])
    (block,) = hub.memory.blocks
    del received
    assert not (block == 0xFF).any()
    del view
    assert (block == 0xFF).all()
