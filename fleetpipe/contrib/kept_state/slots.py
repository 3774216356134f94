"""A file in memory with a few slots, each of which holds one state or none, whole or not at all.

A slot is written whole or counts as empty: its step is taken out before the first byte changes and
put in after the last one. What the bytes of a slot are, its user knows.

    magic; bytes of what follows, of a slot's text, of a slot; number of slots    each 8 bytes
    what the slots hold                                                           the user's words
    the slots: steps + 1 (0: empty), bytes of the text; text; values              at multiples of 64
"""

from __future__ import annotations

import errno
import mmap
import shutil
import struct
from pathlib import Path
from typing import NamedTuple

from fleetpipe import atomic_file, systems
from fleetpipe.errors import CheckpointError

_MAGIC = b"FLTPKEPT"
_HEAD = struct.Struct("<8sQQQQ")
_SLOT = struct.Struct("<QQ")
_ALIGNED = 64


class SlotForm(NamedTuple):
    """What a file is made of.

    Attributes:
        about: What the slots hold, in words of the user's.
        text_bytes: Room for a text in each slot.
        value_bytes: Bytes of a slot behind the text.
        slots: How many there are.
    """

    about: bytes
    text_bytes: int
    value_bytes: int
    slots: int


class Slots:
    """The slots of a file."""

    def __init__(self, file: Path) -> None:
        with file.open("r+b") as opened:
            self._memory = memoryview(mmap.mmap(opened.fileno(), 0))
        _, about_bytes, text_bytes, slot_bytes, slots = _HEAD.unpack_from(self._memory)
        about = bytes(self._memory[_HEAD.size : _HEAD.size + about_bytes])
        value_bytes = slot_bytes - aligned(_SLOT.size) - text_bytes
        self.form = SlotForm(about, text_bytes, value_bytes, slots)
        self._slot_bytes: int = slot_bytes
        self._first = aligned(_HEAD.size + about_bytes)

    @classmethod
    def create(cls, file: Path, form: SlotForm) -> Slots:
        """Makes a file of empty slots, in the place of one of the same name.

        Args:
            file: The file.
            form: What it is made of; room for texts is rounded up.

        Raises:
            CheckpointError: The host has not so much memory for files in memory.
        """
        about, text_bytes, value_bytes, slots = form
        slot_bytes = aligned(_SLOT.size) + aligned(text_bytes) + aligned(value_bytes)
        total = aligned(_HEAD.size + len(about)) + slots * slot_bytes
        with atomic_file.draft_of(file) as draft, draft.open("w+b") as opened:
            _reserve(opened.fileno(), total, file, slots)
            head = _HEAD.pack(_MAGIC, len(about), aligned(text_bytes), slot_bytes, slots)
            opened.write(head + about)
        return cls(file)

    def steps(self) -> list[int]:
        """Returns after how many steps the states are that are there whole, in order."""
        return sorted(count - 1 for count in self._counts() if count)

    def begin(self) -> int:
        """Empties the slot with the oldest state, which is to be written; returns its number."""
        slot = min(range(self.form.slots), key=self._counts().__getitem__)
        self._empty(slot)
        return slot

    def end(self, slot: int, step: int, text: int) -> None:
        """Says that a slot has been written.

        Args:
            slot: Its number.
            step: After how many steps the state is that it holds now.
            text: Bytes of its text.
        """
        _SLOT.pack_into(self._memory, self._at(slot), 0, text)
        _SLOT.pack_into(self._memory, self._at(slot), step + 1, text)

    def slot_of(self, step: int) -> int | None:
        """Returns the number of the slot that holds a state; None where none does."""
        counts = self._counts()
        return counts.index(step + 1) if step + 1 in counts else None

    def text_of(self, slot: int) -> memoryview:
        """Returns the text in a slot; no copy."""
        _, length = _SLOT.unpack_from(self._memory, self._at(slot))
        return self.contents(slot)[:length]

    def contents(self, slot: int) -> memoryview:
        """Returns the memory of a slot: room for the text, and the values behind it."""
        begin = self._at(slot) + aligned(_SLOT.size)
        return self._memory[begin : self._at(slot) + self._slot_bytes]

    def forget_after(self, step: int) -> None:
        """Empties slots with later steps: they will be done again."""
        for slot, count in enumerate(self._counts()):
            if count > step + 1:
                self._empty(slot)

    def _counts(self) -> list[int]:
        places = map(self._at, range(self.form.slots))
        return [_SLOT.unpack_from(self._memory, place)[0] for place in places]

    def _empty(self, slot: int) -> None:
        _SLOT.pack_into(self._memory, self._at(slot), 0, 0)

    def _at(self, slot: int) -> int:
        return self._first + slot * self._slot_bytes


def aligned(size: int) -> int:
    """Returns the multiple of 64 that a number of bytes takes."""
    return -(-size // _ALIGNED) * _ALIGNED


def _reserve(descriptor: int, size: int, file: Path, slots: int) -> None:
    """Takes the memory now: a write beyond what is left of it would end the process."""
    try:
        systems.reserve(descriptor, size)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise CheckpointError(
            f"the state of a rank does not fit into {file.parent}",
            expected=f"{size} bytes for {slots} steps",
            got=f"{shutil.disk_usage(file.parent).free} bytes",
            cause="a container has 64 MiB there unless it is given more (docker --shm-size)",
            fix="give the host more shared memory, or launch without --keep_state",
            permanent=True,
        ) from None
