"""All ranks in one process over transfers as late, and memory as treacherous, as streams allow.

What CPU and sockets forgive, a GPU does not: a tensor that is changed after it was sent, while the
transfer still reads it; one that is used before it was waited for; memory that is read after it was
given back. Here a sent tensor is read when the receiver asks for it, which is the last moment that
any order of streams allows; a received one lies in memory full of NaN until then, and that memory
is NaN again, and another tensor's, as soon as nothing holds it.
"""

from __future__ import annotations

import ctypes
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
from fleetpipe.transport.wire.structure import Structure
from fleetpipe.transport.wire.value import take_apart

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


def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[LateHub]:
    """Has jobs of one process go over late transports; returns these as they are made."""
    made: list[LateHub] = []

    def hub(ranks: int) -> LateHub:
        made.append(LateHub(ranks))
        return made[-1]

    monkeypatch.setattr("fleetpipe.transport.memory.MemoryHub", hub)
    return made
