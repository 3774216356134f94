"""Runs the benchmarks in turn, each under a limit, and prints one table of all their figures.

    python benchmarks/run.py [--short] [--peer PYTHON] [--only NAME ..] [--json FILE]

All of them end within 40 minutes, those of ``--short`` within five, and want an idle machine with
two cores. One that fails or passes its limit is a row that says so; the others run all the same.
The JSON has the figures with their ranges, the machine, versions and commit; beside it stands what
each benchmark printed.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.figures import cells, parser, table
from fleetpipe.version import __version__

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "benchmarks"


class Benchmark(NamedTuple):
    """A script and how it is run.

    Attributes:
        name: Of the file in ``benchmarks/``, or in a folder of it.
        options: With which it runs.
        limit: Seconds after which it is ended.
    """

    name: str
    options: str
    limit: float


#: What ``make benchmarks`` runs; the limits add up to at most 40 minutes.
FULL = (
    Benchmark("pipeline", "--repeats 7", 480),
    Benchmark("run_schedules", "--repeats 5", 330),
    Benchmark("plan", "--rounds 2 --steps 4", 440),
    Benchmark("vocabulary", "--blocks 8 --ranks 2,4 --rounds 2", 140),
    Benchmark("split_backward", "--repeats 3", 180),
    Benchmark("transport", "--seconds 0.5", 40),
    Benchmark("start", "--repeats 3", 160),
    Benchmark("calls", "", 80),
    Benchmark("slices", "", 100),
    Benchmark("captured_cuts", "--repeats 5", 70),
    Benchmark("async_save", "--repeats 8 --rows 64 --blocks 6", 60),
    Benchmark("checkpoint", "--megabytes 200 --repeats 3", 40),
    Benchmark("restart", "--kills 3 --ranks 2", 240),
)
#: What ``make benchmarks-short`` runs, within five minutes.
SHORT = (
    Benchmark("pipeline", "--case gpt tiny --hidden 256 --repeats 5", 150),
    Benchmark("run_schedules", "--hidden 256 --schedules 1F1B ZBH1 ZBV --repeats 3", 80),
    Benchmark("plan", "--case gpt --ranks 2 --rounds 2 --steps 3", 70),
)


def environment() -> dict[str, Any]:
    """Returns machine, versions and commit."""
    paddle = [name for name in ("paddlepaddle", "paddlepaddle-gpu") if _version(name)]
    versions = {name: _version(name) for name in (*paddle, "numpy")}
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "versions": {"python": platform.python_version(), "fleetpipe": __version__, **versions},
        "commit": commit or "unknown",
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def run(benchmark: Benchmark, folder: Path, *options: str) -> dict[str, Any]:
    """Runs a benchmark; returns its figures, seconds, and as ``state`` how it ended."""
    result, log = folder / f"{benchmark.name}.json", folder / f"{benchmark.name}.log"
    result.unlink(missing_ok=True)
    (script,) = (ROOT / "benchmarks").rglob(f"{benchmark.name}.py")
    command = [sys.executable, str(script)]
    command += [*benchmark.options.split(), *options, "--json", str(result)]
    # Scripts of other folders import the benchmarks too.
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    begin = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
            stdout=output,
            stderr=output,
        )
        try:
            code = process.wait(benchmark.limit)
            state = "done" if code == 0 and result.exists() else f"failed: {log}"
        except subprocess.TimeoutExpired:
            state = f"passed its limit of {benchmark.limit:g} s: {log}"
        finally:
            end(process)
    figures = json.loads(result.read_text())["figures"] if state == "done" else []
    seconds = round(time.monotonic() - begin, 1)
    return {**benchmark._asdict(), "state": state, "seconds": seconds, "figures": figures}


def end(process: subprocess.Popen[Any]) -> None:
    """Ends a process, and all that it started: a launcher's ranks have sessions of their own."""
    if process.poll() is None:
        for one in (process.pid, *descendants(process.pid)):
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        process.wait()


def descendants(process: int) -> list[int]:
    """Returns the processes that a process started, and theirs; none where there is no /proc."""
    parents: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    family = [process]
    for one in family:
        family += [child for child, parent in parents.items() if parent == one]
    return family[1:]


def rows(results: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Returns the rows of the table: every figure, and every benchmark that has none."""
    lines: list[tuple[str, ...]] = []
    for result in results:
        if result["state"] != "done":
            lines.append((result["name"], result["state"], "", ""))
        lines += [(result["name"], *cells(figure)) for figure in result["figures"]]
    return lines


def main() -> int:
    """Runs what is asked for; 1 where a benchmark has no figures."""
    options = parser(__doc__)
    options.add_argument("--short", action="store_true", help="five minutes: what a reviewer runs")
    options.add_argument("--only", nargs="+", metavar="NAME", help="leave out all others")
    options.add_argument("--peer", metavar="PYTHON", help="a Python with torch, for pipeline.py")
    arguments = options.parse_args()
    chosen = SHORT if arguments.short else FULL
    if unknown := set(arguments.only or ()) - {benchmark.name for benchmark in chosen}:
        options.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    BUILD.mkdir(parents=True, exist_ok=True)
    path = arguments.json or BUILD / ("short.json" if arguments.short else "full.json")
    written: dict[str, Any] = {**environment(), "benchmarks": []}
    for benchmark in chosen:
        if arguments.only and benchmark.name not in arguments.only:
            continue
        peer = ("--peer", arguments.peer) if arguments.peer and benchmark.name == "pipeline" else ()
        print(f"{benchmark.name}.py, at most {benchmark.limit:g} s", flush=True)
        written["benchmarks"].append(run(benchmark, BUILD, *peer))
        # What there is when the run is cut off can be read.
        path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    results = written["benchmarks"]
    print(table(("benchmark", "figure", "median", "range"), rows(results)))
    print(f"{sum(result['seconds'] for result in results):.0f} s; {path}")
    return int(any(result["state"] != "done" for result in results))


if __name__ == "__main__":
    sys.exit(main())
