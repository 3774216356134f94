"""``fleetpipe parity --whole``: runs a whole script in several ways and compares their trails."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fleetpipe.arguments import using
from fleetpipe.compare.strategies import Changes
from fleetpipe.compare.trail import BEGIN, CallRecord, TrailComparison, compare, unseeded
from fleetpipe.compare.ways import Variant, VariantRun, limit_of, run
from fleetpipe.compare.written import texts_apart
from fleetpipe.errors import UsageError
from fleetpipe.launch.script import script_words


@dataclass(frozen=True)
class WayVerdict:
    """A row of the verdict's table.

    Attributes:
        way: How the script ran.
        passed: Whether nothing of it speaks against the script.
        verdict: In words.
    """

    way: str
    passed: bool
    verdict: str


def compare_ways(options: argparse.Namespace) -> int:
    """Runs the script in each way, and prints a row for each.

    Returns:
        0 if every way agrees with the first, 1 if one does not.

    Raises:
        UsageError: The script fails by itself, or trains no pipeline.
    """
    with tempfile.TemporaryDirectory(prefix="fleetpipe-parity-") as folder:
        rows = []
        for row in _rows(options, Path(folder)):
            rows.append(row)
            print(f"parity: {row.way:<20} {row.verdict}", flush=True)
    failed = [row.way for row in rows if not row.passed]
    print("parity: " + (f"FAILED: {', '.join(failed)}" if failed else "every way agrees"))
    if options.report:
        text = json.dumps([asdict(row) for row in rows], indent=1)
        with using("--report", options.report, "a file that can be written"):
            options.report.write_text(text, encoding="utf-8")
    return 1 if failed else 0


def _rows(options: argparse.Namespace, folder: Path) -> Iterator[WayVerdict]:
    script, ranks = _absolute(options), options.nproc
    changes = [Changes.of(text) for text in options.also]
    limited = () if options.steps is None else ("--steps", str(options.steps))
    begin = time.monotonic()
    first = run(Variant("one process", options=limited), script, folder / "first", None)
    limit = limit_of(time.monotonic() - begin)
    if first.code or not any(first.trail()):
        raise UsageError(
            "the script must run by itself before it is compared with itself",
            got=f"exit code {first.code}, and {sum(map(len, first.trail()))} calls of a pipeline",
            cause=first.tail(),
            fix="run it by fleetpipe run until it ends with 0",
        )
    trained = first.trail()[0][-1].steps
    yield WayVerdict("one process", True, f"{trained} steps, {len(first.trail()[0])} calls")

    def done(number: int, way: Variant) -> VariantRun:
        return run(way, script, folder / str(number), limit)

    again = done(0, Variant("one process, again", options=limited))
    judge = Judge(first, again)
    yield judge.row(again)
    if ranks > 1:
        yield judge.row(done(1, Variant(f"{ranks} ranks", ranks, limited)))
    way = Variant("one device", options=(*limited, "--report", str(folder / "2" / "report.json")))
    yield _row_of_device(done(2, way))
    if trained > 1:
        way = Variant("stopped and resumed", 1, limited, stop_after=trained // 2)
        yield judge.row_of_restart(done(3, way))
    for number, change in enumerate(changes, 4):
        way = Variant(change.text, change.ranks, (*limited, "--set", change.text))
        yield judge.row(done(number, way))


def _absolute(options: argparse.Namespace) -> list[str]:
    """Returns the script and its arguments as they stand on a command line in another folder."""
    words = script_words(options)
    return words if words[0] == "-m" else [str(Path(words[0]).resolve()), *words[1:]]


class Judge:
    """Compares ways with the first one, by what that one does alike when it runs again."""

    def __init__(self, first: VariantRun, again: VariantRun) -> None:
        self._trail = first.trail()
        self._unseeded = unseeded(self._trail, again.trail()) if any(again.trail()) else frozenset()
        self._lines = {
            line: one
            for line, one in first.printed.items()
            if one.numbers and again.printed.get(line) == one
        }
        self._files = {
            path: content
            for path, content in first.files.items()
            if again.files.get(path) == content
        }

    def row(self, done: VariantRun) -> WayVerdict:
        """Returns the row of a way that ran to its end."""
        wrong = self._of_end(done)
        comparison = (
            compare(self._trail, done.trail(), self._unseeded) if any(done.trail()) else None
        )
        return self._row(done, comparison, wrong)

    def row_of_restart(self, done: VariantRun) -> WayVerdict:
        """Returns the row of a way that was stopped in the middle, and started again."""
        before, after = ((done.trail(start) or [[]])[0] for start in (0, 1))
        wrong = self._of_end(done)
        if not after:
            return self._row(done, None, wrong or "the second start has trained nothing")
        if compare(self._trail, [after], self._unseeded).first is None:
            return WayVerdict(done.way.name, not wrong, wrong or "begins anew, in the same bits")
        steps, expected = len(_steps_of(before)), _steps_of(self._trail[0])
        begun = [replace(one, around={}) for one in after if one.call == BEGIN]
        saved = [replace(one, state=expected[steps - 1].state) for one in begun if steps]
        runs = [[*saved, *expected[steps:]]], [[*begun[: len(saved)], *_steps_of(after)]]
        comparison = compare(*runs, self._unseeded)
        return self._row(done, comparison, wrong)

    def _of_end(self, done: VariantRun) -> str:
        if done.code == 124:
            return "did not end within the limit"
        return f"exit code {done.code}: {done.error()}" if done.code else ""

    def _row(self, done: VariantRun, comparison: TrailComparison | None, wrong: str) -> WayVerdict:
        name = done.way.name
        if comparison is None or wrong:
            first = (
                "" if comparison is None or comparison.first is None else f"{comparison.first}; "
            )
            return WayVerdict(name, False, f"DIFFERS: {first}{wrong or 'no call of a pipeline'}")
        if comparison.first is not None and not comparison.rounding:
            drawn = f"; not seeded: {', '.join(sorted(self._unseeded))}" if self._unseeded else ""
            return WayVerdict(name, False, f"DIFFERS: {comparison.first}{drawn}")
        beside = self._output_difference(done, exact=comparison.first is None)
        if beside:
            return WayVerdict(name, False, f"DIFFERS beside the calls: {beside}")
        equal = f"{comparison.steps} steps, {comparison.calls} calls: equal "
        how = (
            "in every bit" if comparison.first is None else f"to rounding; first {comparison.first}"
        )
        return WayVerdict(name, True, equal + how)

    def _output_difference(self, done: VariantRun, exact: bool) -> str:
        """Returns the first difference in files or printed numbers; nothing if there is none.

        Args:
            done: How the way ended.
            exact: Whether its calls have the same bits: else digests may differ, and numbers count.
        """
        for path, content in self._files.items():
            other = done.files.get(path)
            if other is None:
                return f"{path} is not written"
            for name, one in content.items():
                if name not in other or ((one.numbers or exact) and texts_apart(one, other[name])):
                    return f"{path} has another {name or 'content'}"
        for line, one in self._lines.items():
            printed = done.printed.get(line)
            if printed is not None and texts_apart(one, printed):
                return f"it prints {line!r} with {printed.digest}, not {one.digest}"
        return ""


def _steps_of(events: Sequence[CallRecord]) -> list[CallRecord]:
    """Returns the events that train: what is evaluated around a stop may be done again."""
    return [event for event in events if event.trains]


def _row_of_device(done: VariantRun) -> WayVerdict:
    reports = done.reports()
    if not reports:
        return WayVerdict(
            done.way.name, True, f"not compared: {done.error().removeprefix('fleetpipe: ')}"
        )
    passed = all(report["passed"] for report in reports) and not done.code
    bits = "equal in every bit" if all(one["bit_exact"] for one in reports) else "equal to rounding"
    first = next((one["first_difference"] for one in reports if not one["passed"]), done.error())
    return WayVerdict(done.way.name, passed, bits if passed else f"DIFFERS: {first}")
