"""Two slots for the state of one rank, in a file in memory that outlives its process.

A slot is written whole or counts as empty: its step is taken out before the first byte changes and
put in after the last one. While one is written, the other holds the step before.

    magic, bytes of the index, bytes of a slot's text, bytes of a slot    each 8 bytes
    index                                                                 JSON
    two slots: steps + 1 (0: empty), bytes of its text; the text; blocks  at multiples of 64
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fleetpipe.errors import CheckpointError

#: A value of JSON.
Json = Any

_MAGIC = b"FLTPKEPT"
_HEAD = struct.Struct("<8sQQQ")
_SLOT = struct.Struct("<QQ")
_SLOTS = 2
_ALIGNED = 64


class Segment:
    """The state of one rank after its last two steps."""

    def __init__(self, file: Path, sizes: Sequence[int]) -> None:
        """Opens a file that :meth:`create` made.

        Args:
            file: The file.
            sizes: Bytes of each block.
        """
        with file.open("r+b") as opened:
            self._memory = mmap.mmap(opened.fileno(), 0)
        _, index_bytes, text_bytes, slot_bytes = _HEAD.unpack_from(self._memory)
        self._text_bytes: int = text_bytes
        self._slot_bytes: int = slot_bytes
        self._first: int = _aligned(_HEAD.size + index_bytes)
        bytes_ = np.frombuffer(self._memory, np.uint8)
        self._blocks = [
            _blocks_of(bytes_, self._text_at(slot) + self._text_bytes, sizes)
            for slot in range(_SLOTS)
        ]

    @classmethod
    def create(cls, file: Path, index: Json, sizes: Sequence[int], text_bytes: int) -> Segment:
        """Makes a file with two empty slots.

        Args:
            file: The file.
            index: What the blocks are, in words of the caller's.
            sizes: Bytes of each block.
            text_bytes: Most bytes of the text beside them.

        Raises:
            CheckpointError: The host has not so much memory for files in memory.
        """
        text = json.dumps(index).encode()
        text_bytes = _aligned(text_bytes)
        slot_bytes = _aligned(_SLOT.size) + text_bytes + sum(map(_aligned, sizes))
        total = _aligned(_HEAD.size + len(text)) + _SLOTS * slot_bytes
        draft = file.with_name(f".{file.name}")
        with draft.open("w+b") as opened:
            _reserve(opened.fileno(), total, file)
            opened.write(_HEAD.pack(_MAGIC, len(text), text_bytes, slot_bytes) + text)
        draft.rename(file)
        return cls(file, sizes)

    @staticmethod
    def index_of(file: Path) -> Json:
        """Returns the index of a file that :meth:`create` made."""
        with file.open("rb") as opened:
            _, index_bytes, _, _ = _HEAD.unpack(opened.read(_HEAD.size))
            return json.loads(opened.read(index_bytes))

    def steps(self) -> list[int]:
        """Returns the steps that are there whole, ascending."""
        return sorted(count - 1 for count in map(self._count, range(_SLOTS)) if count)

    def takes(self, text: bytes) -> bool:
        """Whether a text is not too long for a slot."""
        return len(text) <= self._text_bytes

    def write(self, step: int, blocks: Sequence[memoryview], text: bytes) -> None:
        """Puts a step into the slot with the older one.

        Args:
            step: Its number.
            blocks: Bytes, as many as each block has.
            text: What goes beside them.
        """
        slot = min(range(_SLOTS), key=self._count)
        _SLOT.pack_into(self._memory, self._slot_at(slot), 0, len(text))
        for place, block in zip(self._blocks[slot], blocks):
            place[:] = np.frombuffer(block, np.uint8)
        begin = self._text_at(slot)
        self._memory[begin : begin + len(text)] = text
        _SLOT.pack_into(self._memory, self._slot_at(slot), step + 1, len(text))

    def forget_after(self, step: int) -> None:
        """Empties slots with later steps: they will be done again."""
        for slot in range(_SLOTS):
            if self._count(slot) > step + 1:
                _SLOT.pack_into(self._memory, self._slot_at(slot), 0, 0)

    def read(self, step: int) -> tuple[list[memoryview], bytes]:
        """Returns the blocks and the text of a step that is there; not copies."""
        slot = next(slot for slot in range(_SLOTS) if self._count(slot) == step + 1)
        _, length = _SLOT.unpack_from(self._memory, self._slot_at(slot))
        begin = self._text_at(slot)
        blocks = [block.data for block in self._blocks[slot]]
        return blocks, bytes(self._memory[begin : begin + length])

    def _count(self, slot: int) -> int:
        count: int = _SLOT.unpack_from(self._memory, self._slot_at(slot))[0]
        return count

    def _slot_at(self, slot: int) -> int:
        return self._first + slot * self._slot_bytes

    def _text_at(self, slot: int) -> int:
        return self._slot_at(slot) + _aligned(_SLOT.size)


def _blocks_of(memory: np.ndarray, begin: int, sizes: Sequence[int]) -> list[np.ndarray]:
    blocks = []
    for size in sizes:
        blocks.append(memory[begin : begin + size])
        begin += _aligned(size)
    return blocks


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _reserve(descriptor: int, size: int, file: Path) -> None:
    """Takes the memory now: a write beyond what is left of it would end the process."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        free = os.statvfs(file.parent)
        raise CheckpointError(
            f"the state of this rank does not fit into {file.parent}",
            expected=f"{size} bytes for the last two steps",
            got=f"{free.f_bavail * free.f_frsize} bytes",
            cause="a container has 64 MiB there unless it is given more (docker --shm-size)",
            fix="give the host more shared memory, or launch without --keep_state",
        ) from None
