"""The ways in which ``fleetpipe parity --whole`` runs a script, each in a folder of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

from fleetpipe.compare import trail, written
from fleetpipe.errors import UsageError

#: A larger file is linked into a way's folder: nothing is copied that a script only reads.
_COPIED_BYTES = 1 << 20
#: A way that lasts longer than this many times the first one, and this many seconds, is ended.
_SLOWER, _SECONDS = 20, 600
#: The line of an error under its traceback, or of a refused command.
_ERROR = re.compile(r"(\[rank \d+\]: )?[\w.]*(Error|Exception|Failed|Timeout): |fleetpipe: ")
#: Seconds in which a process must end that is told to.
_ENDING = 30
#: Of a working directory; with more it is none that is meant to be copied.
_MOST_FILES = 20_000


@dataclass(frozen=True)
class Variant:
    """One way to run the script.

    Attributes:
        name: What the table calls it.
        ranks: Processes.
        options: Options of ``fleetpipe parity`` for the process that runs the script.
        stop_after: Stops the script behind so many steps, and starts it once more; 0 does not.
    """

    name: str
    ranks: int = 1
    options: tuple[str, ...] = ()
    stop_after: int = 0


@dataclass
class VariantRun:
    """How a way ended.

    Attributes:
        folder: Holds the working directory, the trails and what was printed.
        code: The exit code of the last start.
        stamps: The files that were there before it.
    """

    way: Variant
    folder: Path
    code: int = 0
    stamps: dict[Path, tuple[int, int]] = field(default_factory=dict)

    @property
    def working_directory(self) -> Path:
        """The working directory of the script."""
        return self.folder / "run"

    def trail(self, start: int = 0) -> trail.Ranks:
        """Returns the events of each rank in one start."""
        return trail.read(self.folder / f"trail-{start}")

    @cached_property
    def printed(self) -> Mapping[str, Any]:
        """The lines of all ranks, by what stands around their numbers."""
        logs = sorted((self.folder / "logs").glob("workerlog.*")) or [self.folder / "stdout"]
        lines_of_ranks: dict[str, Any] = {}
        for log in logs:
            lines = log.read_text("utf-8", errors="replace").splitlines()
            lines_of_ranks = {**dict(written.enumerate_lines(lines)), **lines_of_ranks}
        return lines_of_ranks

    @cached_property
    def files(self) -> written.Contents:
        """What the script has written."""
        return written.files_in(self.working_directory, self.stamps)

    def reports(self) -> list[dict[str, Any]]:
        """Returns what ``fleetpipe parity --report`` has written; nothing if it did not run."""
        file = self.folder / "report.json"
        return [*json.loads(file.read_text("utf-8"))] if file.is_file() else []

    def error(self) -> str:
        """Returns the line of the last error that it printed, or else its last line."""
        lines = [line.strip() for line in self.tail(10_000).splitlines() if line.strip()]
        errors = [line for line in lines if _ERROR.match(line)]
        return (errors or lines or [""])[-1]

    def tail(self, most: int = 8) -> str:
        """Returns the last lines of what it printed, for an error."""
        text = "".join(
            (self.folder / name).read_text("utf-8", errors="replace")
            for name in ("stdout", "stderr")
        )
        return "\n".join(text.splitlines()[-most:])


def run(way: Variant, script: Sequence[str], folder: Path, limit: float | None) -> VariantRun:
    """Runs a way to its end.

    Args:
        way: The way.
        script: The script and its arguments, as on a command line.
        folder: Is made for it.
        limit: Seconds that it may take; None: as long as it takes.

    Returns:
        How it ended; 124 as code where it was ended by the limit.
    """
    done = VariantRun(way, folder)
    _link_files(Path.cwd(), done.working_directory)
    done.stamps = written.stamps(done.working_directory)
    stops = [("--stop-after", str(way.stop_after)), ()] if way.stop_after else [()]
    for start, stop in enumerate(stops):
        command = [sys.executable, "-m", "fleetpipe", "parity", *way.options, *stop]
        if "--report" not in way.options:
            command += ["--record", str(folder / f"trail-{start}")]
        if way.ranks > 1:
            command += ["--nproc", str(way.ranks), "--log-dir", str(folder / "logs")]
        done.code = _run_process([*command, *script], done, limit)
        if done.code == 124:
            break
    return done


def _run_process(command: Sequence[str], done: VariantRun, limit: float | None) -> int:
    with (done.folder / "stdout").open("ab") as out, (done.folder / "stderr").open("ab") as errors:
        process = subprocess.Popen(
            command,
            cwd=done.working_directory,
            stdout=out,
            stderr=errors,
            stdin=subprocess.DEVNULL,
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            if process.poll() is None:  # its limit is over, or Ctrl-C came
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_ENDING)
                process.kill()
                process.wait()


def limit_of(seconds: float) -> float:
    """Returns the seconds that a way may take, from those that the first one took."""
    return max(_SECONDS, _SLOWER * seconds)


def _link_files(source: Path, target: Path) -> None:
    """Makes a folder like another: small files are copied, larger ones linked.

    Raises:
        UsageError: It has too many files.
    """
    placed = count(1)

    def place(file: str, to: str) -> str:
        if next(placed) > _MOST_FILES:
            raise UsageError(
                "each way runs in a copy of the current folder, which has too many files",
                expected=f"at most {_MOST_FILES}",
                got=str(source),
                fix="run it in the folder of the script, with the data elsewhere",
            )
        if os.path.getsize(file) > _COPIED_BYTES:
            os.symlink(os.path.realpath(file), to)
        else:
            shutil.copy2(file, to)
        return to

    def hidden(_: str, names: list[str]) -> list[str]:
        return [name for name in names if name.startswith(".") or name == "__pycache__"]

    shutil.copytree(
        source, target, copy_function=place, ignore=hidden, ignore_dangling_symlinks=True
    )
