"""The files through which the ranks of an attempt and their launcher inform each other.

An *attempt* is one start of a job's processes; attempts count from 1. The launcher (``fleetpipe
launch``) gives each attempt a number and each host a folder, in which every rank writes its number
of steps, why it failed, and its exit code. Without such a folder nothing is written, and the number
is 0. A *generation* is the time in which the same processes are the ranks of an attempt;
generations count from 0. A launcher that heals a job replaces the process of a rank that ended,
which begins the next generation: the other processes connect again, with the new one, under its
number.
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
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fleetpipe import atomic_file, log, systems
from fleetpipe.errors import (
    ConfigError,
    FleetPipeError,
    PeerFailed,
    PipelineTimeout,
    StateError,
    TransportError,
    is_permanent,
)

#: Longest traceback that is passed on, in characters.
LONGEST_TEXT = 20000
#: The kinds of failure: of each, the error that the other ranks raise.
KINDS: dict[str, type[FleetPipeError]] = {
    "died": PeerFailed,
    "left": PeerFailed,
    "raised": PeerFailed,
    "timed out": PipelineTimeout,
    "sent bytes that are no message": TransportError,
    "makes another call": StateError,
}
#: The most characters of an error in one line.
_LONGEST_LINE = 200

#: The variable with the folder of this attempt on this host.
FOLDER = "FLEETPIPE_LIFE"
#: The variable with the number of the attempt.
NUMBER = "FLEETPIPE_INCARNATION"
#: Exit code of a process that was asked to stop and has saved before: EX_TEMPFAIL.
PREEMPTED = 75
#: Exit code of a process that Ctrl-C has ended, saved or not, as in a shell.
INTERRUPTED = 130
#: The variable with the number of ranks of the job before any was given up.
WHOLE_SIZE = "FLEETPIPE_WHOLE_SIZE"

#: The content of a step counter's file: a number of steps.
_COUNT = struct.Struct("<q")
#: Bytes that the files of an attempt may need; each takes at least a page of memory.
_ATTEMPT_BYTES = 1 << 20
#: Name of the counter of steps that the pipeline has completed.
DONE = "done"

#: Returns the rank of this process in the job.
own_rank = log.own_rank

#: The variable that requests healing, with how many processes may be replaced in an attempt.
HEAL = "FLEETPIPE_HEAL"
#: The variable with the generation in which this process replaced another one.
BEGAN = "FLEETPIPE_GENERATION"
#: The signals to stop that came before this process's script handled them.
early_signals: list[int] = []
#: Files of an attempt: its last generation; one that exists if its ranks are ended on purpose.
_FILE, _ENDED = "generation", "ended_by_supervisor"


@dataclass(frozen=True)
class Failure:
    """Describes for the other ranks the failure of the rank that failed first.

    Attributes:
        rank: Its number in the job.
        what: The kind of failure, one of ``KINDS``.
        text: The error in one line.
        details: Its traceback, or where all ranks were; empty without either.
        permanent: Whether the job would fail again at each restart.
    """

    rank: int
    what: str
    text: str
    details: str = ""
    permanent: bool = False

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """Describes the failure of ``rank``, which gives up with an error."""
        if isinstance(error, PipelineTimeout):
            text, *more = str(error).splitlines()
            return cls(rank, "timed out", text, "\n".join(more)[-LONGEST_TEXT:])
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        trace = "".join(lines)[-LONGEST_TEXT:]
        return cls(rank, "raised", _in_one_line(error), trace, is_permanent(error))

    def error(self, where: str | None = None) -> FleetPipeError:
        """Returns the error that another rank raises because of this failure.

        Args:
            where: The place in the run at which that rank is, for the message.
        """
        fix = f"read the log of rank {self.rank}: it failed first"
        cause = None
        if self.what == "timed out":
            fix = "look for the rank that waits for no other: it is stuck, stopped or too slow"
        elif self.what == "left":
            fix = "give all ranks as many batches, of loaders of one length, and end all alike"
            cause = "its script was done, without an error: it had fewer batches, or skips a call"
        elif self.what == "makes another call":
            fix = "have every rank make the same collective calls, in the same order"
            cause = (
                "what one rank does alone, as `if rank == 0:`, an error that one rank caught, or "
                "another number of batches"
            )
        quoted_details = textwrap.indent(self.details.rstrip(), "    | ", lambda line: True)
        error = KINDS[self.what](
            f"rank {self.rank} {self.what}: {self.text}",
            where=where,
            got=f"from rank {self.rank}:\n{quoted_details}" if self.details else None,
            cause=cause,
            fix=fix,
        )
        if self.what == "raised" and isinstance(error, PeerFailed):
            error.brief = (
                f"{where or 'this rank'}: ends because rank {self.rank} raised {self.text}"
            )
        return error


def _in_one_line(error: BaseException) -> str:
    """Returns an error's class and message; of fleetpipe's errors only the first line."""
    words = str(error).splitlines()[:1] if isinstance(error, FleetPipeError) else str(error).split()
    text = " ".join(words)
    if len(text) > _LONGEST_LINE:
        text = text[:_LONGEST_LINE] + ".."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class ReportedFailure(NamedTuple):
    """A failure that a rank wrote into the folder of its attempt.

    Attributes:
        at: Time of the failure (``time.monotonic()``, which the processes of a host share).
        failure: The failure of the rank that failed first, as far as the writer knows.
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
    """Returns the folder of this attempt of the job on this host; None without a launcher's."""
    path = os.environ.get(FOLDER)
    return Path(path) if path else None


def tell_failure(failure: Failure) -> None:
    """Writes the first failure that this rank knows of into the folder; later ones are ignored."""
    directory = folder()
    if directory is not None:
        with contextlib.suppress(OSError):
            text = json.dumps({"at": time.monotonic(), **asdict(failure)})
            # Two threads may tell at once: the watch's, and the one that failed.
            atomic_file.write_once(directory / f"failure.{own_rank()}", text)


def tell_code(code: int) -> None:
    """Writes the exit code with which this rank will end, for the launcher."""
    _write_rank_file("code", str(code))


def tell_preempted(step: int) -> None:
    """Writes that this rank ends because it was asked to, with ``step`` steps saved."""
    _write_rank_file("preempted", str(step))


def tell_unhealed(why: str) -> None:
    """Writes for the launcher why this rank cannot go on if another one is replaced."""
    _write_rank_file("unhealed", why)


def tell_record(record: Path) -> None:
    """Writes the name of a folder that records this run; the launcher notes the run's end there."""
    directory = folder()
    if directory is not None:
        with (directory / "records").open("a", encoding="utf-8") as file:
            file.write(json.dumps(str(record.absolute())) + "\n")


def records(directory: Path) -> list[Path]:
    """Returns the folders in which the ranks of an attempt on this host record the run."""
    file = directory / "records"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [Path(path) for path in dict.fromkeys(map(json.loads, lines))]


def note_start(directory: Path, rank: int, process: int) -> None:
    """Writes that a launcher has started the process of a rank, with the process's number."""
    _append_row(directory / "started", rank, process)


def note_end(directory: Path, rank: int, code: int) -> None:
    """Writes that the process of a rank has ended, with its exit code; -n for signal n."""
    _append_row(directory / "ended", rank, code)


def started_ranks(directory: Path) -> list[tuple[int, int]]:
    """Returns (rank, process) for each rank of an attempt; of a replaced rank the last process."""
    return [*dict(_read_rows(directory / "started")).items()]


def ended_ranks(directory: Path) -> list[tuple[int, int]]:
    """Returns (rank, exit code) for each process of an attempt that ended, the first one first."""
    return _read_rows(directory / "ended")


def failures(directory: Path) -> list[ReportedFailure]:
    """Returns the failures that the ranks of an attempt wrote, the first one first."""
    reports = []
    for file in directory.glob("failure.*"):
        fields = json.loads(file.read_text(encoding="utf-8"))
        reports.append(ReportedFailure(fields.pop("at"), Failure(**fields)))
    return sorted(reports, key=lambda report: report.at)


def reported_exit_code(directory: Path, rank: int) -> int | None:
    """Returns the exit code that a rank wrote into the folder before it ended; None without one."""
    file = directory / f"code.{rank}"
    return int(file.read_text(encoding="ascii")) if file.exists() else None


def steps_saved_at_stop(directory: Path) -> int | None:
    """Returns how many steps were saved if the attempt was asked to stop; None if it was not."""
    files = directory.glob("preempted.*")
    return max((int(file.read_text(encoding="ascii")) for file in files), default=None)


def whole_size() -> int | None:
    """Returns the number of ranks of the job before any was given up; None if unknown."""
    text = os.environ.get(WHOLE_SIZE, "")
    return int(text) if text.isdecimal() else None


def how_to_go_on(interrupted: bool, saved: int) -> str:
    """Returns the line for the user about a job that has saved its steps and ended.

    Args:
        interrupted: Whether Ctrl-C ended it; else another signal.
        saved: The number of saved steps.
    """
    why = "interrupted" if interrupted else "asked to stop"
    return f"{why}, the job saved {saved} steps: the same command goes on from there"


def steps_begun(directory: Path) -> dict[int, int]:
    """Returns by rank the step in which it was last; ranks without any step are missing."""
    counters = {int(file.suffix[1:]): file.read_bytes() for file in directory.glob("page.*")}
    begun = {rank: _COUNT.unpack(counter)[0] for rank, counter in counters.items()}
    return {rank: count - 1 for rank, count in sorted(begun.items()) if count}


def steps_done(directory: Path) -> int:
    """Returns how many steps the rank that is furthest ahead completed in an attempt."""
    counters = (file.read_bytes() for file in directory.glob(f"{DONE}.*"))
    return max((int(_COUNT.unpack(counter)[0]) for counter in counters), default=0)


def step_counter(name: str = "page") -> Callable[[int], object]:
    """Returns a function that writes a number of steps where the launcher can read it.

    It works in memory that outlives this process, so that the number of a killed rank is known.

    The memory is a file of this rank in the folder of its attempt, mapped into memory, or private
    memory without a folder. All functions for one name in one process write into the same file.

    Args:
        name: The file's name: ``"page"`` for the steps that the script has begun, ``DONE`` for
            those that the pipeline has completed.

    Raises:
        ConfigError: The host has too little memory for files in memory.
    """
    directory = folder()
    memory: bytearray | mmap.mmap = bytearray(_COUNT.size)
    if directory is not None:
        with (directory / f"{name}.{own_rank()}").open("a+b") as file:
            if not file.tell():
                # Memory that is missing when a mapped page is written ends the process.
                _reserve(file.fileno(), _COUNT.size, directory)
            memory = mmap.mmap(file.fileno(), _COUNT.size)
    return functools.partial(_COUNT.pack_into, memory, 0)


def require_space(directory: Path) -> None:
    """Checks that a folder has room for the files of an attempt.

    Raises:
        ConfigError: It has too little.
    """
    probe = directory / "probe"
    try:
        with probe.open("wb") as file:
            _reserve(file.fileno(), _ATTEMPT_BYTES, directory)
    finally:
        probe.unlink(missing_ok=True)


def _reserve(descriptor: int, size: int, directory: Path) -> None:
    """Makes a file ``size`` bytes large; raises an error if the file system has no room."""
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


def _write_rank_file(name: str, text: str) -> None:
    """Writes a file of this rank, if the attempt has a folder."""
    directory = folder()
    if directory is not None:
        # At once: others read it at any time.
        atomic_file.replace_text(directory / f"{name}.{own_rank()}", text)


def _append_row(file: Path, *numbers: int) -> None:
    """Appends a line of numbers to a file."""
    with file.open("a", encoding="ascii") as output:
        output.write(" ".join(map(str, numbers)) + "\n")


def _read_rows(file: Path) -> list[tuple[int, int]]:
    """Returns the lines of a file, each of two numbers; none if there is no file."""
    if not file.exists():
        return []
    rows = (line.split() for line in file.read_text(encoding="ascii").splitlines())
    return [(int(first), int(second)) for first, second in rows]


class Generation(NamedTuple):
    """The processes that are the ranks of an attempt, until one of them is replaced.

    Attributes:
        number: The number of the generation, from 0.
        since: For each rank whose process was replaced, the generation in which the new one began.
        refused: Why the launcher replaces no further process; empty while it may.
    """

    number: int = 0
    since: dict[int, int] = {}  # noqa: RUF012 - never changed
    refused: str = ""


def write_generation(directory: Path, generation: Generation) -> None:
    """Writes the generation that begins now into the folder of an attempt."""
    atomic_file.replace_text(directory / _FILE, json.dumps(generation))


def note_signal(number: int, _frame: object) -> None:
    """Stores a signal that reaches a replaced rank before its script handles signals."""
    early_signals.append(number)


def refuse_healing(directory: Path) -> None:
    """Notes that the ranks of an attempt are ended on purpose, so that none is replaced."""
    (directory / _ENDED).touch()


def is_healing_refused(directory: Path) -> bool:
    """Returns whether the ranks of an attempt are ended on purpose."""
    return (directory / _ENDED).exists()


def current_generation() -> Generation:
    """Returns the last generation of this rank's attempt."""
    directory = folder()
    file = None if directory is None else directory / _FILE
    if file is None or not file.exists():
        return Generation()
    number, since, refused = json.loads(file.read_text(encoding="utf-8"))
    return Generation(number, {int(rank): begun for rank, begun in since.items()}, refused)


def own_generation() -> int:
    """Returns the generation in which this process replaced another one; 0 for the first."""
    return int(os.environ.get(BEGAN, "0"))


def heals() -> bool:
    """Returns whether the launcher of this process replaces ranks that die."""
    return HEAL in os.environ and folder() is not None


def note_place(directory: Path, rank: int, number: int, step: int) -> None:
    """Writes that a rank waits to connect to the others, after a process was replaced.

    Args:
        directory: The folder of the attempt.
        rank: The rank.
        number: The number of the generation.
        step: The number of steps that the rank has done.
    """
    atomic_file.replace_text(directory / f"place.{rank}", json.dumps([number, step]))


def waiting_places(directory: Path, number: int) -> dict[int, int]:
    """Returns for each rank that waits to connect in generation ``number`` its steps done."""
    rows: Iterator[tuple[int, Any]] = (
        (int(file.suffix[1:]), json.loads(file.read_text(encoding="ascii")))
        for file in directory.glob("place.*")
        if file.suffix[1:].isdecimal()
    )
    return {rank: step for rank, (generation, step) in rows if generation == number}
