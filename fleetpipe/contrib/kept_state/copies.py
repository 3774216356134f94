"""Copies of one state of a rank, which other hosts hold, and how a rank asks for one.

Whoever makes copies listens at a socket in the folder of the kept states. A rank that has kept a
step to be copied says so there, and trains on once its bytes have been read.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fleetpipe.contrib.kept_state.slots import SlotForm, Slots

#: Every so many steps the state of a rank is copied: as many are lost with a host, at most.
COPY_EVERY = 10
#: The socket, in the folder of the kept states.
SOCKET = "copies"
#: Seconds that a rank waits for its bytes to be read.
LIMIT_SECONDS = 30.0
_SLOTS = 2


class Copy(NamedTuple):
    """One state of a rank.

    Attributes:
        form: Of the file that has it.
        text_bytes: Bytes of the text beside its values.
        contents: The bytes of its slot.
    """

    form: SlotForm
    text_bytes: int
    contents: np.ndarray


def request(folder: Path, rank: int, step: int) -> None:
    """Has the state after a step copied, where anybody makes copies; returns when it is read."""
    # Without an answer training goes on: the other side sees that the bytes have changed.
    family = socket.AF_UNIX  # type: ignore[attr-defined,unused-ignore]
    with contextlib.suppress(OSError), socket.socket(family) as asking:
        asking.settimeout(LIMIT_SECONDS)
        asking.connect(str(folder / SOCKET))
        asking.sendall(b"%d %d\n" % (rank, step))
        asking.recv(1)


def find(files: Iterable[Path], step: int) -> tuple[Slots, Copy] | None:
    """Returns the state after a step that one of some files has, and the slots of that file.

    Its bytes are the file's own: they are those of the step for as long as the slots say so, and
    whoever copies them asks these afterwards.
    """
    for slots in map(Slots, files):
        slot = slots.slot_of(step)
        if slot is not None:
            contents = np.frombuffer(slots.contents(slot), np.uint8)
            return slots, Copy(slots.form, len(slots.text_of(slot)), contents)
    return None


def place(folder: Path, rank: int, step: int, copy: Copy) -> None:
    """Makes a copy what a rank has kept in a folder, beside what is there.

    Raises:
        CheckpointError: The host has not so much memory.
    """
    number = 1 + max((int(file.suffix[1:]) for file in folder.glob(f"rank-{rank}.*")), default=0)
    write(folder / f"rank-{rank}.{number}", step, copy, _SLOTS)


def write(file: Path, step: int, copy: Copy, slots: int = 1) -> None:
    """Writes a copy into a file, by default one without a slot for another state.

    Raises:
        CheckpointError: The host has not so much memory.
    """
    made = Slots.create(file, copy.form._replace(slots=slots))
    slot = made.begin()
    np.frombuffer(made.contents(slot), np.uint8)[:] = copy.contents
    made.end(slot, step, copy.text_bytes)
