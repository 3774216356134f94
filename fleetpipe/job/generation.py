"""The file by which a launcher that heals a job tells its ranks which processes were replaced.

A *generation* is a time in which the same processes are the ranks of an attempt. The launcher ends
one when it starts a process in the place of a rank that ended; the processes that stay connect
again, with the new one, under the number of the next.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fleetpipe import atomic_file
from fleetpipe.job import attempt_files

#: Asks for healing; its value is how many processes may be replaced in an attempt.
HEAL = "FLEETPIPE_HEAL"
#: Has the generation in which this process began in the place of another.
BEGAN = "FLEETPIPE_GENERATION"
#: The signals that asked this process to stop before its script handled them.
early_signals: list[int] = []
_FILE, _ENDED = "generation", "ended_by_supervisor"


class Generation(NamedTuple):
    """The processes of an attempt.

    Attributes:
        number: How many generations came before.
        since: The generation in which the process of a rank began, of those that were replaced.
        refused: Why the launcher replaces no further process; empty while it may.
    """

    number: int = 0
    since: dict[int, int] = {}  # noqa: RUF012 - never changed
    refused: str = ""


def write(directory: Path, generation: Generation) -> None:
    """Writes the generation that begins into the folder of an attempt."""
    with atomic_file.draft_of(directory / _FILE) as draft:
        draft.write_text(json.dumps(generation), encoding="utf-8")


def note_signal(number: int, _frame: object) -> None:
    """Handles a signal in a process that replaces a rank, until its script does."""
    early_signals.append(number)


def refuse(directory: Path) -> None:
    """Notes that the ranks of an attempt are ended, which no launcher is to make good."""
    (directory / _ENDED).touch()


def is_refused(directory: Path) -> bool:
    """Whether the ranks of an attempt are ended by whoever started it."""
    return (directory / _ENDED).exists()


def current() -> Generation:
    """Returns the generation of this rank's attempt that has begun last."""
    directory = attempt_files.folder()
    file = None if directory is None else directory / _FILE
    if file is None or not file.exists():
        return Generation()
    number, since, refused = json.loads(file.read_text(encoding="utf-8"))
    return Generation(number, {int(rank): begun for rank, begun in since.items()}, refused)


def began() -> int:
    """Returns the generation in which this process replaced another one; 0 for the first."""
    return int(os.environ.get(BEGAN, "0"))


def asked_for() -> bool:
    """Whether the launcher of this process heals the job."""
    return HEAL in os.environ and attempt_files.folder() is not None


def note_place(directory: Path, rank: int, number: int, step: int) -> None:
    """Writes that a rank waits for a generation, with the number of steps that it has done."""
    with atomic_file.draft_of(directory / f"place.{rank}") as draft:
        draft.write_text(json.dumps([number, step]), encoding="ascii")


def places(directory: Path, number: int) -> dict[int, int]:
    """Returns the steps done of the ranks that wait for a generation, by rank."""
    rows: Iterator[tuple[int, Any]] = (
        (int(file.suffix[1:]), json.loads(file.read_text(encoding="ascii")))
        for file in directory.glob("place.*")
        if file.suffix[1:].isdecimal()
    )
    return {rank: step for rank, (at, step) in rows if at == number}
