"""``fleetpipe parity --whole``: runs a whole script in several ways, and compares the results.

A way (``Variant``) is a number of ranks, a schedule, a restart. Each runs in a folder of its own.
Its results (``VariantRun``) are a trail, which records the calls of the pipeline, files, and the
lines that it prints. Start with ``compare_ways``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from fleetpipe.arguments import using
from fleetpipe.checkpoint.files.manifest import MANIFEST
from fleetpipe.checkpoint.hash_command import digests_in
from fleetpipe.compare import trail
from fleetpipe.compare.trail import (
    BEGIN,
    CallRecord,
    Changes,
    Summary,
    TrailComparison,
    compare,
    summaries,
    unseeded_generators,
)
from fleetpipe.errors import FleetPipeError, UsageError
from fleetpipe.launch.script import script_words
from fleetpipe.paddle_api import paddle

#: A number with a decimal point or an exponent; integers are not compared, since they count ranks
#: and rows.
_FLOAT = re.compile(r"[-+]?\d+\.\d+(?:e[-+]?\d+)?|[-+]?\d+e[-+]?\d+|\bnan\b|\binf\b")
_NUMBER = re.compile(r"\d+")
#: The endings of files that are compared line by line.
_TEXTS = {".csv", ".json", ".jsonl", ".log", ".md", ".txt", ".tsv", ".yaml", ".yml"}
#: The largest relative difference of numbers in texts, where they are written rounded.
_ROUNDING_OF_TEXT = 1e-4

#: The summaries of a file's contents, by the path of the file.
Contents = Mapping[str, Mapping[str, Summary]]

#: A file with more bytes is linked into a way's folder, not copied: scripts mostly read such files.
_COPIED_BYTES = 1 << 20
#: A way is ended when it takes longer than both this multiple of the first way's time, and this
#: many seconds.
_TIMES_FIRST, _LEAST_LIMIT = 20, 600
#: The line of an error under its traceback, or of a refused command.
_ERROR = re.compile(r"(\[rank \d+\]: )?[\w.]*(Error|Exception|Failed|Timeout): |fleetpipe: ")
#: The exit code of a way that its limit has ended, as of the command ``timeout``.
_TIMED_OUT = 124
#: Seconds between SIGTERM and SIGKILL.
_SECONDS_TO_END = 30
#: The most files of a working directory that is copied.
_MOST_FILES = 20_000


def files_in(folder: Path, before: Mapping[Path, tuple[int, int]]) -> Contents:
    """Summarizes the files that a run has made or changed, by relative path.

    A checkpoint of fleetpipe is summarized by its tensors, since its files depend on the ranks.

    Args:
        folder: The working directory of the run.
        before: The stamp of each file before the run, as :func:`stamps` returns them.
    """
    checkpoints = [path.parent for path in sorted(folder.rglob(MANIFEST))]
    contents = {str(one.relative_to(folder)): _summarize_checkpoint(one) for one in checkpoints}
    for path, stamp in stamps(folder).items():
        inside = any(checkpoint in path.parents for checkpoint in checkpoints)
        if before.get(path) != stamp and not inside and not path.name.startswith("."):
            contents[str(path.relative_to(folder))] = _summarize_file(path)
    return contents


def stamps(folder: Path) -> dict[Path, tuple[int, int]]:
    """Returns the time of the last change and the size of each file below a folder."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            status = path.stat()
            files[path] = status.st_mtime_ns, status.st_size
    return files


def _summarize_checkpoint(step: Path) -> Mapping[str, Summary]:
    """Summarizes the tensors of a checkpoint by name; or the error, if it cannot be read."""
    try:
        return {name: Summary("tensor", digest) for name, digest in digests_in(step).items()}
    except FleetPipeError as error:
        return {"": Summary.of_plain(str(error))}


def _summarize_file(path: Path) -> Mapping[str, Summary]:
    """Summarizes a file: the lines of a text, the tensors of an archive, or else its bytes."""
    if path.suffix in _TEXTS:
        return dict(enumerate_lines(path.read_text("utf-8", errors="replace").splitlines()))
    with suppress(Exception):  # a file that cannot be loaded is compared by its bytes
        if path.suffix in {".pdparams", ".pdopt", ".pdstates"}:
            return summaries(paddle.load(str(path)))
        if path.suffix in {".npy", ".npz"}:
            loaded = np.load(path)
            return summaries(dict(loaded) if path.suffix == ".npz" else loaded)
    return {"": Summary.of_bytes("bytes", path.read_bytes())}


def enumerate_lines(lines: Iterable[str]) -> Iterator[tuple[str, Summary]]:
    """Yields a key and a summary for each line of a text.

    The key is the line with its numbers replaced by "#", and how often such a line came before.
    """
    seen: Counter[str] = Counter()
    for line in lines:
        words = _NUMBER.sub("#", _FLOAT.sub("#.#", line.strip()))
        numbers = tuple(map(float, _FLOAT.findall(line)))
        seen[words] += 1
        yield f"{words} ({seen[words]})", Summary("text", repr(numbers), numbers)


@dataclass(frozen=True)
class Variant:
    """A way to run the script: with how many ranks and which options.

    Attributes:
        name: The name in the table of results.
        ranks: The number of processes.
        options: Options of ``fleetpipe parity`` for the process that runs the script.
        stop_after: The number of steps after which the script is stopped and started again; 0 runs
            it once.
    """

    name: str
    ranks: int = 1
    options: tuple[str, ...] = ()
    stop_after: int = 0


@dataclass
class VariantRun:
    """The results of a run of the script, read from the folder of the run.

    Attributes:
        variant: How the script ran.
        folder: The folder of its working directory, its trails and what it printed.
        code: The exit code of the last start.
        stamps: The result of :func:`stamps` for the working directory before the run.
    """

    variant: Variant
    folder: Path
    code: int = 0
    stamps: dict[Path, tuple[int, int]] = field(default_factory=dict)

    @property
    def working_directory(self) -> Path:
        """The working directory of the script."""
        return self.folder / "run"

    def trail(self, start: int = 0) -> trail.Ranks:
        """Returns each rank's recorded events of the first start of the script, or a later one."""
        return trail.read(self.folder / f"trail-{start}")

    @cached_property
    def printed(self) -> Mapping[str, Any]:
        """Summaries of the lines that any rank prints, by the keys of :func:`enumerate_lines`.

        If several ranks print lines with the same key, it is the summary of the first rank's line.
        """
        logs = sorted((self.folder / "logs").glob("workerlog.*")) or [self.folder / "stdout"]
        lines_of_ranks: dict[str, Any] = {}
        for log in logs:
            lines = log.read_text("utf-8", errors="replace").splitlines()
            lines_of_ranks = {**dict(enumerate_lines(lines)), **lines_of_ranks}
        return lines_of_ranks

    @cached_property
    def files(self) -> Contents:
        """The files that the script has written."""
        return files_in(self.working_directory, self.stamps)

    def reports(self) -> list[dict[str, Any]]:
        """Reads the reports that ``fleetpipe parity --report`` has written, if there are any."""
        file = self.folder / "report.json"
        return [*json.loads(file.read_text("utf-8"))] if file.is_file() else []

    def error(self) -> str:
        """Returns the line of the last error that the script printed, or else its last line."""
        lines = [line.strip() for line in self.tail(10_000).splitlines() if line.strip()]
        errors = [line for line in lines if _ERROR.match(line)]
        return (errors or lines or [""])[-1]

    def tail(self, count: int = 8) -> str:
        """Returns the last ``count`` lines that the script printed."""
        text = "".join(
            (self.folder / name).read_text("utf-8", errors="replace")
            for name in ("stdout", "stderr")
        )
        return "\n".join(text.splitlines()[-count:])


def run(variant: Variant, script: Sequence[str], folder: Path, limit: float | None) -> VariantRun:
    """Runs the script once, with the ranks and the options of a variant, to its end.

    Args:
        variant: The number of ranks, the options, and whether to stop and start the script again.
        script: The script and its arguments, as on a command line.
        folder: The folder for the run, which is created.
        limit: Seconds that the run may take; None sets no limit.

    Returns:
        The results; the exit code is 124 if the limit has ended the run.
    """
    # The files before the run are noted, so that ``files`` tells which the script has written.
    done = VariantRun(variant, folder)
    _link_files(Path.cwd(), done.working_directory)
    done.stamps = stamps(done.working_directory)
    # The options of each start: the first is stopped if there is a second.
    stops = [("--stop-after", str(variant.stop_after)), ()] if variant.stop_after else [()]
    for start, stop in enumerate(stops):
        command = [sys.executable, "-m", "fleetpipe", "parity", *variant.options, *stop]
        # With --report the run is compared with one device, and no trail is recorded.
        if "--report" not in variant.options:
            command += ["--record", str(folder / f"trail-{start}")]
        if variant.ranks > 1:
            command += ["--nproc", str(variant.ranks), "--log-dir", str(folder / "logs")]
        done.code = _run_process([*command, *script], done, limit)
        if done.code == _TIMED_OUT:
            break
    return done


def _run_process(command: Sequence[str], done: VariantRun, limit: float | None) -> int:
    """Runs a command in a run's working directory; appends its output to the files of the run.

    Args:
        command: The command.
        done: The run, whose folder has the files.
        limit: Seconds that the command may take; None sets no limit.

    Returns:
        The exit code; 124 if the limit has ended the command.
    """
    with (done.folder / "stdout").open("ab") as out, (done.folder / "stderr").open("ab") as errors:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": errors}
        process = subprocess.Popen(command, cwd=done.working_directory, **streams)
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return _TIMED_OUT
        finally:
            if process.poll() is None:  # its limit is over, or Ctrl-C came
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_SECONDS_TO_END)
                process.kill()
                process.wait()


def _link_files(source: Path, target: Path) -> None:
    """Makes a folder with the files of another: small files are copied, larger ones linked.

    Raises:
        UsageError: The folder has too many files.
    """
    counter = count(1)

    def copy_or_link(file: str, to: str) -> str:
        """Copies a small file, links a large one, and refuses one file too many."""
        if next(counter) > _MOST_FILES:
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

    def hidden_names(_: str, names: list[str]) -> list[str]:
        """Returns the names that are left out: hidden files, and Python's caches."""
        return [name for name in names if name.startswith(".") or name == "__pycache__"]

    shutil.copytree(
        source,
        target,
        copy_function=copy_or_link,
        ignore=hidden_names,
        ignore_dangling_symlinks=True,
    )


@dataclass(frozen=True)
class WayVerdict:
    """A row of the table of results.

    Attributes:
        way: The name of the way to run the script, such as "4 ranks".
        passed: Whether the run agrees with the one in the first row.
        verdict: The result in words.
    """

    way: str
    passed: bool
    verdict: str


def compare_ways(options: argparse.Namespace) -> int:
    """Runs the script in each way (ranks and options), and prints a row for each.

    Returns:
        0 if every way agrees with the first, 1 if one does not.

    Raises:
        UsageError: The script fails by itself, or trains no pipeline.
    """
    with tempfile.TemporaryDirectory(prefix="fleetpipe-parity-") as folder:
        rows = []
        for row in _run_ways(options, Path(folder)):
            rows.append(row)
            print(f"parity: {row.way:<20} {row.verdict}", flush=True)
    failed = [row.way for row in rows if not row.passed]
    print("parity: " + (f"FAILED: {', '.join(failed)}" if failed else "every way agrees"))
    if options.report:
        text = json.dumps([asdict(row) for row in rows], indent=1)
        with using("--report", options.report, "a file that can be written"):
            options.report.write_text(text, encoding="utf-8")
    return 1 if failed else 0


def _run_ways(options: argparse.Namespace, folder: Path) -> Iterator[WayVerdict]:
    """Runs the script in one way (ranks and options) after another; yields a row for each.

    Raises:
        UsageError: The script fails by itself, or trains no pipeline.
    """
    script, ranks = script_words(options), options.nproc
    if script[0] != "-m":  # each way runs in another folder
        script[0] = str(Path(script[0]).resolve())
    changes = [Changes.of(text) for text in options.also]
    limited = () if options.steps is None else ("--steps", str(options.steps))
    begin = time.monotonic()
    first = run(Variant("one process", options=limited), script, folder / "first", None)
    limit = max(_LEAST_LIMIT, _TIMES_FIRST * (time.monotonic() - begin))
    if first.code or not any(first.trail()):
        raise UsageError(
            "the script must run by itself before it is compared with itself",
            got=f"exit code {first.code}, and {sum(map(len, first.trail()))} calls of a pipeline",
            cause=first.tail(),
            fix="run it by fleetpipe run until it ends with 0",
        )
    trained = first.trail()[0][-1].steps
    yield WayVerdict("one process", True, f"{trained} steps, {len(first.trail()[0])} calls")

    def run_variant(number: int, variant: Variant) -> VariantRun:
        """Runs the script as a variant, in the folder with a number."""
        return run(variant, script, folder / str(number), limit)

    again = run_variant(0, Variant("one process, again", options=limited))
    judge = Judge(first, again)
    yield judge.verdict_of(again)
    if ranks > 1:
        yield judge.verdict_of(run_variant(1, Variant(f"{ranks} ranks", ranks, limited)))
    variant = Variant(
        "one device", options=(*limited, "--report", str(folder / "2" / "report.json"))
    )
    yield _compare_with_one_device(run_variant(2, variant))
    if trained > 1:
        variant = Variant("stopped and resumed", 1, limited, stop_after=trained // 2)
        yield judge.verdict_of_restart(run_variant(3, variant))
    for number, change in enumerate(changes, 4):
        variant = Variant(change.text, change.ranks, (*limited, "--set", change.text))
        yield judge.verdict_of(run_variant(number, variant))


class Judge:
    """Compares the results of several ways to run a script with those of the first way.

    Only results that are equal when the first way runs again are compared.
    """

    def __init__(self, first: VariantRun, again: VariantRun) -> None:
        """Stores the results of the first way that are equal in its second run.

        Args:
            first: The results of the first way.
            again: The results of the second run of the same way.
        """
        #: The events of the first way, by rank; it has one.
        self._trail = first.trail()
        #: The names of the random generators that the script does not seed.
        self._unseeded = (
            unseeded_generators(self._trail, again.trail()) if any(again.trail()) else frozenset()
        )
        #: The summaries of the printed lines with numbers, by the keys of :func:`enumerate_lines`.
        self._lines = {
            line: summary
            for line, summary in first.printed.items()
            if summary.numbers and again.printed.get(line) == summary
        }
        self._files = {
            path: content
            for path, content in first.files.items()
            if again.files.get(path) == content
        }

    def verdict_of(self, done: VariantRun) -> WayVerdict:
        """Returns the table's row for a run that ended by itself."""
        got = done.trail()
        comparison = compare(self._trail, got, self._unseeded) if any(got) else None
        return self._verdict(done, comparison, self._describe_failure(done))

    def verdict_of_restart(self, done: VariantRun) -> WayVerdict:
        """Returns the table's row for a run that was stopped in the middle, and started again."""
        # The events of the only rank, before the stop and after it.
        before, after = ((done.trail(start) or [[]])[0] for start in (0, 1))
        wrong = self._describe_failure(done)
        if not after:
            return self._verdict(done, None, wrong or "the second start has trained nothing")
        if compare(self._trail, [after], self._unseeded).first is None:
            return WayVerdict(
                done.variant.name, not wrong, wrong or "begins anew, in the same bits"
            )
        steps, expected = len(_training_steps(before)), _training_steps(self._trail[0])
        # The state with which the second start begins is that of the last step before the stop.
        begins = [replace(event, around={}) for event in after if event.call == BEGIN]
        saved = [replace(event, state=expected[steps - 1].state) for event in begins if steps]
        runs = [[*saved, *expected[steps:]]], [[*begins[: len(saved)], *_training_steps(after)]]
        comparison = compare(*runs, self._unseeded)
        return self._verdict(done, comparison, wrong)

    def _describe_failure(self, done: VariantRun) -> str:
        """Returns how a run failed, in words; "" if it ended with exit code 0."""
        if done.code == _TIMED_OUT:
            return "did not end within the limit"
        return f"exit code {done.code}: {done.error()}" if done.code else ""

    def _verdict(
        self, done: VariantRun, comparison: TrailComparison | None, wrong: str
    ) -> WayVerdict:
        """Returns the row of a run for the table of results.

        Args:
            done: The results of the way.
            comparison: The comparison of the run's events with those of the first way; None if no
                event was recorded.
            wrong: The failure of the run in words; "" if it has not failed.
        """
        name, first = done.variant.name, comparison and comparison.first
        if comparison is None or wrong:
            shown = f"{first}; " if first else ""
            return WayVerdict(name, False, f"DIFFERS: {shown}{wrong or 'no call of a pipeline'}")
        if first and not comparison.rounding:
            drawn = f"; not seeded: {', '.join(sorted(self._unseeded))}" if self._unseeded else ""
            return WayVerdict(name, False, f"DIFFERS: {first}{drawn}")
        beside = self._output_difference(done, exact=first is None)
        if beside:
            return WayVerdict(name, False, f"DIFFERS beside the calls: {beside}")
        how = f"to rounding; first {first}" if first else "in every bit"
        calls = f"{comparison.steps} steps, {comparison.calls} calls"
        return WayVerdict(name, True, f"{calls}: equal {how}")

    def _output_difference(self, done: VariantRun, exact: bool) -> str:
        """Returns the first difference in files or printed numbers, in words; "" without one.

        A line that this way does not print at all is no difference: ways may print other lines.

        Args:
            done: The results of the way.
            exact: Whether the calls have the same bits as the first way's. If they differ by
                rounding, only summaries with numbers are compared: rounding changes every other.
        """
        for path, content in self._files.items():
            here = done.files.get(path)
            if here is None:
                return f"{path} is not written"
            # The name is that of a line or of a tensor in the file, "" for the file as a whole.
            for name, summary in content.items():
                compared = exact or summary.numbers
                if name not in here or (
                    compared and summary.distance(here[name]) > _ROUNDING_OF_TEXT
                ):
                    return f"{path} has another {name or 'content'}"
        for line, summary in self._lines.items():
            printed = done.printed.get(line)
            if printed is not None and summary.distance(printed) > _ROUNDING_OF_TEXT:
                return f"it prints {line!r} with {printed.digest}, not {summary.digest}"
        return ""


def _training_steps(events: Sequence[CallRecord]) -> list[CallRecord]:
    """Returns the events that train: only these are the same when a run is stopped and resumed."""
    return [event for event in events if event.trains]


def _compare_with_one_device(done: VariantRun) -> WayVerdict:
    """Returns the table's row for the run that ``fleetpipe parity`` compared with one device."""
    reports = done.reports()
    if not reports:
        why = done.error().removeprefix("fleetpipe: ")
        return WayVerdict(done.variant.name, True, f"not compared: {why}")
    passed = all(report["passed"] for report in reports) and not done.code
    bits = "equal in every bit" if all(one["bit_exact"] for one in reports) else "equal to rounding"
    first = next((one["first_difference"] for one in reports if not one["passed"]), done.error())
    return WayVerdict(done.variant.name, passed, bits if passed else f"DIFFERS: {first}")
