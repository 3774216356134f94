"""What systems differ in, and the package as on a system that is not here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fleetpipe import systems
from fleetpipe.errors import UsageError
from tests import hidden_names
from tests.fixtures import Patch

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[2]
#: What the suite runs as on each system: one process, and ranks on the one that lacks most.
TESTS = {
    "win32": ["tests/checkpoint/test_files.py", "tests/engine/test_engine.py"],
    "darwin": [
        "tests/transport/joining/test_hosts.py",
        "tests/processes/axes/test_data_parallel.py",
    ],
    "no-boot-id": ["tests/transport/joining/test_connections.py"],
}


@pytest.mark.skipif(bool(hidden_names.SYSTEM), reason="this is such a run")
@pytest.mark.parametrize("system", TESTS)
def test_a_system_that_is_not_here(system: str) -> None:
    pytest.importorskip("mypy", reason="its stubs say what a system lacks")
    folders = [str(ROOT / "tests" / "hidden_names"), str(ROOT)]
    # The run makes, and in the end removes, a folder of its own for crashes.
    inherited = {k: v for k, v in os.environ.items() if k != "FLEETPIPE_TEST_CRASHES"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS[system]],
        cwd=ROOT,
        env={**inherited, "FLEETPIPE_TEST_SYSTEM": system, "PYTHONPATH": os.pathsep.join(folders)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout


def test_what_systems_differ_in_is_there() -> None:
    for start in {start for table in hidden_names.DIFFERENT.values() for start in table}:
        file, _, test = start.partition("::")
        assert (ROOT / file).exists(), start
        named = f"\ndef {test.partition('[')[0]}"
        assert not test or named in (ROOT / file).read_text(encoding="utf-8"), start


def test_windows_starts_no_ranks(monkeypatch: Patch) -> None:
    systems.require_ranks()
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(UsageError, match="run several ranks in WSL"):
        systems.require_ranks()


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_a_file_takes_its_place_at_once(platform: str, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    size = (1 << 20) + 5
    with (tmp_path / "file").open("w+b") as file:
        systems.reserve(file.fileno(), size)
        file.write(b"head")
    content = (tmp_path / "file").read_bytes()
    assert (len(content), content[:5]) == (size, b"head\0")
    assert os.stat(tmp_path / "file").st_blocks * 512 >= size


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_figures_of_this_host(platform: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert 1 <= systems.processors() <= (os.cpu_count() or 1)
    assert systems.memory_bytes() > 1 << 28
    assert ("lo", "127.0.0.1") in systems.interfaces()
    assert len(systems.anonymous_memory(100)) == 100


@pytest.mark.parametrize(
    "text", ["nr_throttled 3\nthrottled_time 250000000\n", "throttled_usec 250000\n"]
)
def test_a_time_in_which_a_container_may_not_run_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "cpu.stat").write_text(text)
    (tmp_path / "schedstat").write_text("1 750000000 9")
    queue = systems.ProcessorQueue()
    queue._file = queue._open_file(str(tmp_path / "schedstat"))
    queue._group = queue._open_file(str(tmp_path / "cpu.stat"))
    assert (queue.seconds(), queue.limited_seconds()) == (0.75, 0.25)
    assert queue._open_file(str(tmp_path / "missing")) is None


@pytest.mark.parametrize(
    ("groups", "file", "limit", "folder"),
    [
        ("0::/jobs/one\n", "jobs/one/cpu.max", "50000 100000", "jobs/one"),
        ("0::/jobs/one\n", "jobs/cpu.max", "50000 100000", "jobs"),
        ("0::/docker/12ab\n", "cpu.max", "50000 100000", ""),
        ("0::/jobs/one\n", "jobs/one/cpu.max", "max 100000", None),
        ("5:memory:/a\n4:cpu,cpuacct:/jobs\n", "cpu/jobs/cpu.cfs_quota_us", "50000", "cpu/jobs"),
        ("4:cpu:/docker/12ab\n0::/\n", "cpu/cpu.cfs_quota_us", "50000", "cpu"),
        ("4:cpu:/\n", "cpu/cpu.cfs_quota_us", "-1", None),
        ("", "cpu.max", "50000 100000", None),
    ],
)
def test_the_limit_of_the_nearest_group_counts(
    tmp_path: Path, groups: str, file: str, limit: str, folder: str | None
) -> None:
    """Also in a container, which has its own group where the host has the root of all."""
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(limit)
    expected = None if folder is None else tmp_path / folder
    assert systems._limited_group(groups, tmp_path) == expected
