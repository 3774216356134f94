"""The state of one rank after its last steps, in a file in memory that outlives its process.

It has two slots: while one is written, the other holds the step before.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fleetpipe.launch.keeping.slots import SlotForm, Slots, aligned

#: A value of JSON.
Json = Any
_SLOTS = 2


class Segment:
    """The tensors of one rank as blocks of bytes, and a text beside them, once for each slot."""

    def __init__(self, slots: Slots, sizes: Sequence[int]) -> None:
        """Takes slots that :meth:`create` made."""
        self._slots = slots
        text_bytes = slots.form.text_bytes
        self._blocks = [
            _blocks_of(np.frombuffer(slots.contents(slot), np.uint8), text_bytes, sizes)
            for slot in range(slots.form.slots)
        ]

    @classmethod
    def create(cls, file: Path, index: Json, sizes: Sequence[int], text_bytes: int) -> Segment:
        """Makes a file with empty slots.

        Args:
            file: The file.
            index: What the blocks are, in words of the caller's.
            sizes: Bytes of each block.
            text_bytes: Most bytes of the text beside them.

        Raises:
            CheckpointError: The host has not so much memory for files in memory.
        """
        form = SlotForm(json.dumps(index).encode(), text_bytes, sum(map(aligned, sizes)), _SLOTS)
        return cls(Slots.create(file, form), sizes)

    def steps(self) -> list[int]:
        """Returns after how many steps the states are that are there whole, in order."""
        return self._slots.steps()

    def takes(self, text: bytes) -> bool:
        """Whether a text is not too long for a slot."""
        return len(text) <= self._slots.form.text_bytes

    def write(self, step: int, blocks: Sequence[memoryview], text: bytes) -> None:
        """Puts a state into the slot with the oldest one."""
        slot = self._slots.begin()
        for place, block in zip(self._blocks[slot], blocks):
            place[:] = np.frombuffer(block, np.uint8)
        self._slots.contents(slot)[: len(text)] = text
        self._slots.end(slot, step, len(text))

    def forget_after(self, step: int) -> None:
        """Empties slots with later steps: they will be done again."""
        self._slots.forget_after(step)

    def read(self, step: int) -> tuple[list[memoryview], bytes]:
        """Returns the blocks and the text of a state that is there; not copies."""
        slot = self._slots.slot_of(step)
        if slot is None:
            raise KeyError(step)
        blocks = [block.data for block in self._blocks[slot]]
        return blocks, bytes(self._slots.text_of(slot))


def _blocks_of(memory: np.ndarray, begin: int, sizes: Sequence[int]) -> list[np.ndarray]:
    blocks = []
    for size in sizes:
        blocks.append(memory[begin : begin + size])
        begin += aligned(size)
    return blocks
