"""Stores the state of every step in this host's memory, which survives the death of a rank.

Start with ``kept_state.py``, the part of a rank, which writes into a folder of the supervisor.
This file has the format of the files, a ``Segment`` for each rank, and finds the steps that all
ranks of a layout have kept. It needs no Paddle, since the supervisor uses it too.

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
_HEAD = struct.Struct("<8sQQ")
_SLOT = struct.Struct("<QQ")
_SLOTS = range(2)
_ALIGNED = 64


class Segment:
    """The tensors of one rank as blocks of bytes with a text, in two slots.

    Attributes:
        index: The caller's description of the blocks: any JSON value.
    """

    def __init__(self, file: Path) -> None:
        """Opens a file with its states."""
        with file.open("r+b") as opened:
            self._memory = memoryview(mmap.mmap(opened.fileno(), 0))
        _, about_bytes, text_bytes = _HEAD.unpack_from(self._memory)
        self._text_bytes: int = text_bytes
        begin = _HEAD.size + about_bytes
        self.index, sizes = json.loads(bytes(self._memory[_HEAD.size : begin]))
        slot_bytes = _slot_bytes(sizes, text_bytes)
        self._places = [_align(begin) + slot * slot_bytes for slot in _SLOTS]
        self._blocks = {place: self._blocks_at(place, sizes) for place in self._places}

    @classmethod
    def create(cls, file: Path, index: Any, sizes: Sequence[int], text_bytes: int) -> Segment:
        """Creates a file with empty slots.

        Raises:
            CheckpointError: The host has too little memory for files in memory.
        """
        about = json.dumps([index, [*sizes]]).encode()
        size = _align(_HEAD.size + len(about)) + len(_SLOTS) * _slot_bytes(sizes, text_bytes)
        with atomic_file.draft_of(file) as draft, draft.open("w+b") as opened:
            _reserve(opened.fileno(), size, file)
            opened.write(_HEAD.pack(_MAGIC, len(about), text_bytes) + about)
        return cls(file)

    def steps(self) -> list[int]:
        """Returns the steps of the complete states, in order."""
        return sorted(count - 1 for count in self._counts() if count)

    def takes(self, text: bytes) -> bool:
        """Whether a text fits into a slot."""
        return len(text) <= self._text_bytes

    def write(self, step: int, blocks: Sequence[memoryview], text: bytes) -> None:
        """Writes a state into the slot with the oldest one."""
        place = min(zip(self._counts(), self._places))[1]
        self._mark(place, 0, 0)
        for memory, block in zip(self._blocks[place], blocks):
            memory[:] = np.frombuffer(block, np.uint8)
        begin = place + _align(_SLOT.size)
        self._memory[begin : begin + len(text)] = text
        self._mark(place, 0, len(text))
        self._mark(place, step + 1, len(text))

    def read(self, step: int) -> tuple[list[memoryview], bytes]:
        """Returns the blocks and the text of a stored state, without a copy."""
        place = self._places[self._counts().index(step + 1)]
        begin, (_, length) = place + _align(_SLOT.size), _SLOT.unpack_from(self._memory, place)
        blocks = [block.data for block in self._blocks[place]]
        return blocks, bytes(self._memory[begin : begin + length])

    def forget_after(self, step: int) -> None:
        """Empties the slots with later steps, which will run again."""
        for count, place in zip(self._counts(), self._places):
            if count > step + 1:
                self._mark(place, 0, 0)

    def _counts(self) -> list[int]:
        """Returns for each slot the step of its state plus one; 0 if it is empty."""
        return [_SLOT.unpack_from(self._memory, place)[0] for place in self._places]

    def _mark(self, place: int, count: int, text_bytes: int) -> None:
        _SLOT.pack_into(self._memory, place, count, text_bytes)

    def _blocks_at(self, place: int, sizes: Sequence[int]) -> list[np.ndarray]:
        """Returns the memory of a slot's blocks."""
        begin, blocks = place + _align(_SLOT.size) + _align(self._text_bytes), []
        for size in sizes:
            blocks.append(np.frombuffer(self._memory[begin : begin + size], np.uint8))
            begin += _align(size)
        return blocks


def _slot_bytes(sizes: Sequence[int], text_bytes: int) -> int:
    return _align(_SLOT.size) + _align(text_bytes) + sum(map(_align, sizes))


def _align(size: int) -> int:
    """Rounds a number of bytes up to a multiple of 64."""
    return -(-size // _ALIGNED) * _ALIGNED


def _reserve(descriptor: int, size: int, file: Path) -> None:
    """Allocates the memory now: a later write without memory would end the process."""
    try:
        systems.reserve(descriptor, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG):
            raise
        limited = error.errno == errno.EFBIG
        raise CheckpointError(
            f"the state of a rank does not fit into {file.parent}",
            expected=f"{size} bytes for {len(_SLOTS)} steps",
            got="a lower limit on the size of files (ulimit -f)"
            if limited
            else f"{shutil.disk_usage(file.parent).free} bytes",
            cause=None
            if limited
            else "a container has 64 MiB there unless it is given more (docker --shm-size)",
            fix=f"{'raise that limit' if limited else 'give the host more shared memory'}, "
            "or launch without --keep_state",
            permanent=True,
        ) from None


class KeptLayout(NamedTuple):
    """The newest step that all ranks of a layout have kept completely.

    Attributes:
        degrees: The number of ranks along each axis; one process may play those of a pipeline.
        step: The step.
        segments: The segment of each rank, by rank.
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
            lefts = [left for left in range(1, degree) if axis == "pp" or degree % left == 0]
            numbers += [ranks * left // degree for left in reversed(lefts)]
            ranks //= degree
        # One process may play all stages.
        return tuple(number for number in numbers if number)


def complete_layouts(folder: Path) -> list[KeptLayout]:
    """Returns every layout of which all ranks have kept one step, the newest step first."""
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
        steps = [{step for one in ones for step in one.steps()} for ones in ranks]
        newest = max(set.intersection(*steps), default=None)
        if newest is not None:
            holders = [next(one for one in ones if newest in one.steps()) for ones in ranks]
            complete.append(KeptLayout(holders[0].index["degrees"], newest, tuple(holders)))
    return sorted(complete, key=lambda one: -one.step)


def newest_kept(folder: Path) -> tuple[int, int, tuple[int, ...]] | None:
    """Returns the newest kept step, how many ranks kept it, and the smaller numbers of ranks."""
    kept = next(iter(complete_layouts(folder)), None)
    return kept and (kept.step, len(kept.segments), kept.smaller)
