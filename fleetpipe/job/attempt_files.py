"""The files through which a rank tells its launcher how it fares, if the job may be restarted.

An *attempt* is one start of a job's processes; attempts count from 1. The launcher (``fleetpipe
launch``) gives each attempt a number and each host a folder, in which every rank writes a page of
steps, why it failed, and its exit code. Without such a folder nothing is written, and the number is
0.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import mmap
import os
import shutil
import struct
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from fleetpipe import atomic_file, log, systems
from fleetpipe.errors import ConfigError
from fleetpipe.job.watching.failure import Failure

#: Names the folder of this attempt on this host.
FOLDER = "FLEETPIPE_LIFE"
#: Has the number of the attempt.
NUMBER = "FLEETPIPE_INCARNATION"
#: Status of a process that was asked to stop, and has saved before it did: EX_TEMPFAIL.
PREEMPTED = 75
#: Status of what Ctrl-C has ended, saved or not, as a shell has it.
INTERRUPTED = 130
#: Has the number of ranks that the job has where none is given up.
WHOLE_SIZE = "FLEETPIPE_WHOLE_SIZE"

#: What a page holds: how many steps the rank has begun in all attempts.
_COUNT = struct.Struct("<q")
#: Bytes that the files of an attempt may need, at a page of memory or more each.
_ATTEMPT_BYTES = 1 << 20
#: The page of the number of steps that a rank did.
DONE = "done"

own_rank = log.own_rank


class ReportedFailure(NamedTuple):
    """A failure that a rank wrote into the folder of its attempt.

    Attributes:
        at: Time of the failure (``time.monotonic()``, which the processes of a host share).
        failure: The failure of the rank that failed first, as far as this one knows.
    """

    at: float
    failure: Failure


def number() -> int:
    """Returns the number of this attempt; 0 without a launcher that counts.

    Raises:
        ConfigError: The environment variable is not a number.
    """
    text = os.environ.get(NUMBER, "0")
    if not text.isdecimal():
        raise ConfigError(
            f"{NUMBER} is no number of an attempt",
            where="the environment",
            got=repr(text),
            fix=f"leave {NUMBER} to fleetpipe launch, or give all ranks the same whole number",
        )
    return int(text)


def folder() -> Path | None:
    """Returns the folder of this attempt on this host; None if the launcher gave none."""
    path = os.environ.get(FOLDER)
    return Path(path) if path else None


def tell_failure(failure: Failure) -> None:
    """Writes a failure into the folder, once: the first one that this rank knows of."""
    directory = folder()
    if directory is not None:
        with contextlib.suppress(OSError):
            text = json.dumps({"at": time.monotonic(), **asdict(failure)})
            # Two threads may tell at once: the watch's, and the one that failed.
            atomic_file.write_once(directory / f"failure.{own_rank()}", text)


def tell_code(code: int) -> None:
    """Writes the code with which this rank will exit."""
    _leave("code", str(code))


def tell_preempted(step: int) -> None:
    """Writes that this rank ends because it was asked to, with ``step`` steps saved."""
    _leave("preempted", str(step))


def tell_unhealed(why: str) -> None:
    """Writes why a death is not made good, for a launcher that replaces processes."""
    _leave("unhealed", why)


def tell_record(record: Path) -> None:
    """Writes the name of a folder that records this run; the launcher notes its end there."""
    directory = folder()
    if directory is not None:
        with (directory / "records").open("a", encoding="utf-8") as opened:
            opened.write(json.dumps(str(record.absolute())) + "\n")


def records(directory: Path) -> list[Path]:
    """Returns the folders in which the ranks of an attempt on this host record the run."""
    file = directory / "records"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [Path(path) for path in dict.fromkeys(map(json.loads, lines))]


def note_start(directory: Path, rank: int, process: int) -> None:
    """Writes, for the launcher of a rank, the number of its process."""
    _append(directory / "started", rank, process)


def note_end(directory: Path, rank: int, code: int) -> None:
    """Writes, for the launcher of a rank, the exit code of its process; -n: by signal n."""
    _append(directory / "ended", rank, code)


def started_ranks(directory: Path) -> list[tuple[int, int]]:
    """Returns the ranks of an attempt with the numbers of their processes, the last of each."""
    return [*dict(_rows(directory / "started")).items()]


def ended_ranks(directory: Path) -> list[tuple[int, int]]:
    """Returns the ranks whose processes ended, the first one first, with their exit codes."""
    return _rows(directory / "ended")


def failures(directory: Path) -> list[ReportedFailure]:
    """Returns the failures that the ranks of an attempt wrote, the first one first."""
    reports = []
    for file in directory.glob("failure.*"):
        fields = json.loads(file.read_text(encoding="utf-8"))
        reports.append(ReportedFailure(fields.pop("at"), Failure(**fields)))
    return sorted(reports, key=lambda report: report.at)


def code_of(directory: Path, rank: int) -> int | None:
    """Returns the exit code that a rank announced; None if it announced none."""
    file = directory / f"code.{rank}"
    return int(file.read_text(encoding="ascii")) if file.exists() else None


def preempted_at(directory: Path) -> int | None:
    """Returns how many steps an attempt saved that was asked to end; None if it was not asked."""
    return max(
        (int(f.read_text(encoding="ascii")) for f in directory.glob("preempted.*")), default=None
    )


def whole_size() -> int | None:
    """Returns the number of ranks that the job has where none is given up; None if unknown."""
    text = os.environ.get(WHOLE_SIZE, "")
    return int(text) if text.isdecimal() else None


def how_to_go_on(interrupted: bool, saved: int) -> str:
    """Returns the line that tells the user once that a job has saved, was ended, and goes on."""
    why = "interrupted" if interrupted else "asked to stop"
    return f"{why}, the job saved {saved} steps: the same command goes on from there"


def steps_begun(directory: Path) -> dict[int, int]:
    """Returns by rank the step that each was in; ranks without any step are missing."""
    pages = {int(file.suffix[1:]): file.read_bytes() for file in directory.glob("page.*")}
    begun = {rank: _COUNT.unpack(page)[0] for rank, page in pages.items()}
    return {rank: count - 1 for rank, count in sorted(begun.items()) if count}


def steps_done(directory: Path) -> int:
    """Returns how many steps the most advanced rank completed in an attempt."""
    pages = (file.read_bytes() for file in directory.glob(f"{DONE}.*"))
    return max((int(_COUNT.unpack(page)[0]) for page in pages), default=0)


def page(name: str = "page") -> Callable[[int], object]:
    """Returns a function that writes a number of steps into memory that outlives this process.

    The memory is this rank's page in the folder of its attempt, or private memory without a folder.
    All functions for one name in one process write into the same page.

    Args:
        name: ``"page"`` for the steps that the script has begun, ``DONE`` for those that the
            pipeline has completed.

    Raises:
        ConfigError: The host has too little memory for files in memory.
    """
    directory = folder()
    memory: bytearray | mmap.mmap = bytearray(_COUNT.size)
    if directory is not None:
        with (directory / f"{name}.{own_rank()}").open("a+b") as opened:
            if not opened.tell():
                # Memory that is missing when a mapped page is written ends the process.
                _reserve(opened.fileno(), _COUNT.size, directory)
            memory = mmap.mmap(opened.fileno(), _COUNT.size)
    return functools.partial(_COUNT.pack_into, memory, 0)


def require_space(directory: Path) -> None:
    """Checks that a folder has room for the files of an attempt."""
    probe = directory / "probe"
    try:
        with probe.open("wb") as opened:
            _reserve(opened.fileno(), _ATTEMPT_BYTES, directory)
    finally:
        probe.unlink(missing_ok=True)


def _reserve(descriptor: int, size: int, directory: Path) -> None:
    try:
        systems.reserve(descriptor, size)
    except OSError as error:
        if error.errno == errno.EFBIG:
            return  # a limit on the size of one file: those here are small
        raise ConfigError(
            f"{directory.parent} has no room for the files by which ranks tell how they fare",
            expected=f"{size} bytes",
            got=f"{shutil.disk_usage(directory).free} bytes are free: {error}",
            cause="a container has 64 MiB in /dev/shm unless it is given more (docker --shm-size)",
            fix="remove what fills it, or give the host more shared memory",
        ) from None


def _leave(name: str, text: str) -> None:
    directory = folder()
    if directory is not None:
        # Whole: others read it at any time.
        atomic_file.replace_text(directory / f"{name}.{own_rank()}", text)


def _append(file: Path, *numbers: int) -> None:
    with file.open("a", encoding="ascii") as opened:
        opened.write(" ".join(map(str, numbers)) + "\n")


def _rows(file: Path) -> list[tuple[int, int]]:
    if not file.exists():
        return []
    rows = (line.split() for line in file.read_text(encoding="ascii").splitlines())
    return [(int(first), int(second)) for first, second in rows]
