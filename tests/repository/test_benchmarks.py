"""The run of all benchmarks: its limits, and what it says of those that fail or take too long."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from benchmarks import run
from benchmarks.figures import Figure
from tests.fixtures import Patch

pytestmark = pytest.mark.once

GOOD = """
import sys
from pathlib import Path
from benchmarks.figures import Figure, report
report([Figure("a step", [3.0, 1.0, 2.0], "ms")], Path(sys.argv[-1]))
"""
SLOW = """
import subprocess, sys, time
code = "import time; time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""


def test_the_limits_are_those_of_the_whole_run() -> None:
    assert sum(benchmark.limit for benchmark in run.FULL) <= 40 * 60
    assert sum(benchmark.limit for benchmark in run.SHORT) <= 5 * 60


def test_every_benchmark_with_a_parser_is_run() -> None:
    folders = ("", "checkpoints", "schedules")
    scripts = {
        path.stem for name in folders for path in (run.ROOT / "benchmarks" / name).glob("*.py")
    }
    # The last of these prints the table of a page.
    apart = {"__init__", "run", "figures", "compare_schedules"}
    assert {*scripts, "split_backward"} - apart == {one.name for one in run.FULL}
    assert {one.name for one in run.SHORT} <= {one.name for one in run.FULL}


def test_one_that_fails_or_hangs_is_a_row(tmp_path: Path, monkeypatch: Patch) -> None:
    scripts = {"good": GOOD, "bad": "raise SystemExit('no')", "slow": SLOW}
    (tmp_path / "benchmarks").mkdir()
    for name, text in scripts.items():
        (tmp_path / "benchmarks" / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(run.ROOT))
    monkeypatch.setattr(run, "ROOT", tmp_path)
    limits = {"good": 60, "bad": 60, "slow": 2}
    results = [run.run(run.Benchmark(n, "", limits[n]), tmp_path) for n in scripts]
    assert run.rows(results) == [
        ("good", "a step, ms", "2", "1 to 3"),
        ("bad", f"failed: {tmp_path}/bad.log", "", ""),
        ("slow", f"passed its limit of 2 s: {tmp_path}/slow.log", "", ""),
    ]
    child = int((tmp_path / "slow.log").read_text())
    deadline = time.monotonic() + 10
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(child), "a process of a benchmark outlives its limit"


def _runs(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_the_environment_is_named() -> None:
    environment = run.environment()
    assert environment["versions"]["numpy"]
    assert environment["processor"]
    assert environment["cores"] == os.cpu_count()


def test_a_figure_has_median_and_range() -> None:
    row = Figure("x", [4.0, 1.0, 2.0, 3.0], "s").summary()
    assert (row["median"], row["least"], row["most"], row["count"]) == (2.5, 1.0, 4.0, 4)
