"""Stores the state after every step in this host's memory, which survives the death of a rank.

Such a state is called kept. Start with ``kept_state.py``, the part of a rank, which writes into a
folder of the supervisor. This file has the format of the files, a ``Segment`` for each rank, and
finds the steps that all ranks of a layout have kept. It needs no Paddle, since the supervisor uses
it too.

A segment has two slots, each for one state of a rank. A slot has a complete state or counts as
empty: its step is removed before the first byte changes and set after the last one. While one slot
is written, the other has the step before.

    magic; bytes of what follows; room for the text of a slot                     each 8 bytes
    index, and the sizes of a slot's blocks                                       JSON
    the slots: steps + 1 (0: empty), bytes of the text; text; blocks              at multiples of 64
"""

from __future__ import annotations

import errno
import json
import mmap
import shutil
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fleetpipe import atomic_file, systems
from fleetpipe.errors import CheckpointError

_MAGIC = b"FLTPKEPT"
#: The first bytes of a file: magic, bytes of index and sizes, bytes of room for a text.
_FILE_HEADER = struct.Struct("<8sQQ")
#: The first bytes of a slot: its step plus one, and the bytes of its text.
_SLOT_HEADER = struct.Struct("<QQ")
_SLOT_NUMBERS = range(2)
_ALIGNMENT = 64


class Segment:
    """A file in memory with two states of one rank, each in a slot: blocks of bytes, and a text.

    A block has the bytes of a tensor; the text is JSON with the rest of the state.

    Attributes:
        index: The caller's description of the blocks: any JSON value.
    """

    def __init__(self, file: Path) -> None:
        """Opens a file that :meth:`create` has made, perhaps in an earlier process."""
        with file.open("r+b") as opened:
            self._memory = memoryview(mmap.mmap(opened.fileno(), 0))
        _, about_bytes, text_bytes = _FILE_HEADER.unpack_from(self._memory)
        self._text_bytes: int = text_bytes
        begin = _FILE_HEADER.size + about_bytes
        self.index, sizes = json.loads(bytes(self._memory[_FILE_HEADER.size : begin]))
        slot_bytes = _slot_bytes(sizes, text_bytes)
        self._slot_offsets = [_align(begin) + slot * slot_bytes for slot in _SLOT_NUMBERS]
        self._blocks = {offset: self._blocks_at(offset, sizes) for offset in self._slot_offsets}

    @classmethod
    def create(cls, file: Path, index: Any, sizes: Sequence[int], text_bytes: int) -> Segment:
        """Creates a file with empty slots.

        Args:
            file: The file to create.
            index: The description of the blocks.
            sizes: The bytes of each block.
            text_bytes: The most bytes of a text.

        Raises:
            CheckpointError: The host has too little memory for files in memory.
        """
        about = json.dumps([index, [*sizes]]).encode()
        size = _align(_FILE_HEADER.size + len(about)) + len(_SLOT_NUMBERS) * _slot_bytes(
            sizes, text_bytes
        )
        with atomic_file.draft_of(file) as draft, draft.open("w+b") as opened:
            _reserve_memory(opened.fileno(), size, file)
            opened.write(_FILE_HEADER.pack(_MAGIC, len(about), text_bytes) + about)
        return cls(file)

    def steps(self) -> list[int]:
        """Returns the steps after which the complete states were stored, in order."""
        return sorted(count - 1 for count in self._stored_counts() if count)

    def takes(self, text: bytes) -> bool:
        """Returns whether a text fits into a slot."""
        return len(text) <= self._text_bytes

    def write(self, step: int, blocks: Sequence[memoryview], text: bytes) -> None:
        """Writes the state after ``step`` steps into the empty slot, or over the older state.

        Args:
            step: The step.
            blocks: The bytes of the blocks, in the order of the index.
            text: The rest of the state, which must fit (:meth:`takes`).
        """
        _, offset = min(zip(self._stored_counts(), self._slot_offsets))
        self._mark_slot(offset, 0, 0)
        for memory, block in zip(self._blocks[offset], blocks):
            memory[:] = np.frombuffer(block, np.uint8)
        begin = offset + _align(_SLOT_HEADER.size)
        self._memory[begin : begin + len(text)] = text
        self._mark_slot(offset, 0, len(text))
        self._mark_slot(offset, step + 1, len(text))

    def read(self, step: int) -> tuple[list[memoryview], bytes]:
        """Returns the blocks and the text of a stored state; the blocks are not copied."""
        offset = self._slot_offsets[self._stored_counts().index(step + 1)]
        begin = offset + _align(_SLOT_HEADER.size)
        _, length = _SLOT_HEADER.unpack_from(self._memory, offset)
        blocks = [block.data for block in self._blocks[offset]]
        return blocks, bytes(self._memory[begin : begin + length])

    def forget_after(self, step: int) -> None:
        """Empties the slots with later steps, which will run again."""
        for count, offset in zip(self._stored_counts(), self._slot_offsets):
            if count > step + 1:
                self._mark_slot(offset, 0, 0)

    def _stored_counts(self) -> list[int]:
        """Returns for each slot the step of its state plus one; 0 if it is empty."""
        return [_SLOT_HEADER.unpack_from(self._memory, offset)[0] for offset in self._slot_offsets]

    def _mark_slot(self, offset: int, count: int, text_bytes: int) -> None:
        """Writes the header of the slot at a byte offset; ``count`` is its step plus one, or 0."""
        _SLOT_HEADER.pack_into(self._memory, offset, count, text_bytes)

    def _blocks_at(self, offset: int, sizes: Sequence[int]) -> list[np.ndarray]:
        """Returns the memory of each block of the slot at a byte offset."""
        begin, blocks = offset + _align(_SLOT_HEADER.size) + _align(self._text_bytes), []
        for size in sizes:
            blocks.append(np.frombuffer(self._memory[begin : begin + size], np.uint8))
            begin += _align(size)
        return blocks


def _slot_bytes(sizes: Sequence[int], text_bytes: int) -> int:
    """Returns the bytes of a slot with blocks of these sizes and room for a text."""
    return _align(_SLOT_HEADER.size) + _align(text_bytes) + sum(map(_align, sizes))


def _align(size: int) -> int:
    """Rounds a number of bytes up to a multiple of 64."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _reserve_memory(descriptor: int, size: int, file: Path) -> None:
    """Allocates the memory of a file, since a later write without memory would end the process.

    Raises:
        CheckpointError: There is too little memory.
    """
    try:
        systems.reserve(descriptor, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG):
            raise
        cause: str | None = None
        if error.errno == errno.EFBIG:
            got = "a lower limit on the size of files (ulimit -f)"
            remedy = "raise that limit"
        else:
            got = f"{shutil.disk_usage(file.parent).free} bytes"
            cause = "a container has 64 MiB there unless it is given more (docker --shm-size)"
            remedy = "give the host more shared memory"
        raise CheckpointError(
            f"the state of a rank does not fit into {file.parent}",
            expected=f"{size} bytes for {len(_SLOT_NUMBERS)} steps",
            got=got,
            cause=cause,
            fix=f"{remedy}, or launch without --keep_state",
            permanent=True,
        ) from None


class KeptLayout(NamedTuple):
    """The newest step after which all ranks of a layout have stored their states.

    Attributes:
        degrees: The number of ranks along each axis; one process may run all ranks of a pipeline.
        step: The step.
        segments: The segment that has the state of each rank, by rank.
    """

    degrees: Mapping[str, int]
    step: int
    segments: tuple[Segment, ...]

    @property
    def smaller(self) -> tuple[int, ...]:
        """The smaller numbers of ranks that the script's degrees allow, the largest first.

        If the script leaves dp open, the number of replicas becomes a divisor of what it was, so
        that it divides the samples of a batch too; then the pipeline may have fewer stages.
        """
        numbers, ranks = [], len(self.segments)
        for axis in self.segments[0].index["narrows"]:
            degree = self.degrees[axis]
            for smaller in range(degree - 1, 0, -1):
                if axis == "pp" or degree % smaller == 0:
                    numbers.append(ranks * smaller // degree)
            ranks //= degree
        # One process may play all stages.
        return tuple(number for number in numbers if number)


def complete_layouts(folder: Path) -> list[KeptLayout]:
    """Returns every layout of which all ranks have stored one step, the newest step first.

    Args:
        folder: The folder with the segments of all ranks of this host.
    """
    #: By layout, and in it by rank, the segments.
    layouts: dict[str, list[list[Segment]]] = {}
    for file in sorted(folder.glob("rank-*")):
        try:
            segment = Segment(file)
        except FileNotFoundError:
            continue  # a rank has just removed the segment of another layout
        index = segment.index
        count, degrees = index["ranks"], index["degrees"]
        ranks = layouts.setdefault(f"{count} {degrees}", [[] for _ in range(count)])
        ranks[index["rank"]].append(segment)
    complete = []
    for ranks in layouts.values():
        steps = [{step for segment in of_rank for step in segment.steps()} for of_rank in ranks]
        newest = max(set.intersection(*steps), default=None)
        if newest is not None:
            with_step = [next(s for s in of_rank if newest in s.steps()) for of_rank in ranks]
            complete.append(KeptLayout(with_step[0].index["degrees"], newest, tuple(with_step)))
    return sorted(complete, key=lambda layout: -layout.step)


def newest_kept(folder: Path) -> tuple[int, int, tuple[int, ...]] | None:
    """Returns the newest step that all ranks of a layout have stored; None if there is none.

    Returns:
        The step, the number of ranks that stored it, and :attr:`KeptLayout.smaller`: fewer ranks
        with which the job could go on.
    """
    kept = next(iter(complete_layouts(folder)), None)
    return kept and (kept.step, len(kept.segments), kept.smaller)
