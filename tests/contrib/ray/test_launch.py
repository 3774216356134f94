"""A script that knows nothing of Ray, on two nodes of a cluster on this machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'fleetpipe[ray]'")

from fleetpipe.contrib.ray.reaper import marked
from tests.launching import ROOT, Finished

_WORKER = ROOT / "tests" / "launch" / "resume_worker.py"
_LIMIT_SECONDS = 240
_PACE = {"RESUME_WORKER_PAUSE": "0.3", "RESUME_WORKER_SAVES": "100"}
_CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
node = cluster.add_node(num_cpus=1)
print(cluster.address, flush=True)
for line in sys.stdin:
    cluster.remove_node(node, allow_graceful=False)
    node = cluster.add_node(num_cpus=1)
cluster.shutdown()
"""
_ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
# Ray runs what it starts behind all else of a machine, which tests have to themselves at most.
_OF_CLUSTER = {**_ENVIRONMENT, "RAY_worker_niceness": "0"}

pytestmark = [pytest.mark.processes, pytest.mark.timeout(2 * _LIMIT_SECONDS)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[str, IO[str]]]:
    """Where two nodes for one rank each are; at a line one of them is lost, and another comes."""
    with subprocess.Popen(
        [sys.executable, "-c", _CLUSTER],
        env=_OF_CLUSTER,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process.stdin
        process.stdin.close()
        process.wait(60)


@pytest.fixture(scope="module")
def address(cluster: tuple[str, IO[str]]) -> str:
    """Where the cluster is."""
    return cluster[0]


def _launch(
    folder: Path,
    address: str,
    *words: str,
    events: Mapping[str, Callable[[subprocess.Popen[str]], object]] = MappingProxyType({}),
) -> tuple[int, str]:
    """Runs ``fleetpipe launch --ray``; an event happens at the first line with its key."""
    command = [sys.executable, "-m", "fleetpipe", "launch", "--ray", address, *words]
    lines = []
    left = dict(events)
    with subprocess.Popen(
        command,
        cwd=folder,
        env={**_ENVIRONMENT, **_PACE, "JOB_OF_THE_TEST": str(folder)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            for begin in [begin for begin in left if line.startswith(begin)]:
                left.pop(begin)(process)
    return process.returncode, "".join(lines)


def _bits(output: str) -> Sequence[str]:
    return [line for line in output.splitlines() if line.startswith("bits ")]


def _left(folder: Path) -> list[str]:
    """The processes that still run in a folder, ten seconds later at most."""
    until = time.monotonic() + 10
    while True:
        found = []
        for path in Path("/proc").glob("[0-9]*/cwd"):
            try:
                if path.readlink() == folder:
                    found.append((path.parent / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.1)


def test_a_job_that_loses_a_rank_and_a_node_and_is_stopped_goes_on_with_its_bits(
    cluster: tuple[str, IO[str]], tmp_path: Path, launch: Callable[..., Finished]
) -> None:
    address, orders = cluster

    def lose_a_node(_: object) -> None:
        orders.write("lose a node\n")
        orders.flush()

    size = ("--nnodes", "2", "--nproc", "1", "--wait", "60", "--checkpoint_dir", "kept")
    script = (str(_WORKER), "24", "1.1.3=9")
    events = {"step 10 ": lose_a_node, "step 20 ": subprocess.Popen.terminate}
    code, output = _launch(tmp_path, address, *size, "--keep_state", *script, events=events)
    assert code == 75, output
    # A rank that is killed costs no step, and says so by one that is left.
    assert "fleetpipe: attempt 1 ended in step 3: rank 1 died (was ended by SIGKILL)" in output
    assert "attempt 2 begins: restart 1 of 3" in output
    assert "goes on after 3 steps, as they were kept in memory" in output
    # What a lost node kept, another one has a copy of.
    assert re.search(r"goes on after 1\d steps, as they were kept in memory", output), output
    assert "asked to stop, the job saved 2" in output
    logs = [(tmp_path / "log" / f"workerlog.{rank}").read_text() for rank in range(2)]
    assert all("step 2 " in log and "step 20 " in log for log in logs)

    code, output = _launch(tmp_path, address, *size, *script)
    assert code == 0, output
    assert "step 19 " not in output
    assert _bits(output) == _bits(launch(_WORKER, None, args=["24"]).logs[0]) != []
    assert _left(tmp_path) == []


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="there is no /proc")
def test_all_processes_of_an_own_cluster_may_be_asked_to_stop(tmp_path: Path) -> None:
    def ask(_: object) -> None:  # as systemd and scancel do
        for process in marked(f"JOB_OF_THE_TEST={tmp_path}".encode()):
            os.kill(process, signal.SIGTERM)

    words = ("--nproc", "1", "--checkpoint_dir", "kept", str(_WORKER), "200")
    code, output = _launch(tmp_path, "local", *words, events={"step 5 ": ask})
    assert code == 75, output
    assert re.search(r"asked to stop, the job saved \d+ steps and ended", output), output
    assert _left(tmp_path) == []


def test_a_cluster_that_is_too_small_is_told_before_anything_starts(
    address: str, tmp_path: Path
) -> None:
    code, output = _launch(tmp_path, address, "--nnodes", "3", "--wait", "0", str(_WORKER), "8")
    assert code == 2
    assert "the Ray cluster is too small for the job" in output
    assert "expected: 3 nodes with 1 CPU each" in output
    assert not (tmp_path / "log").exists()
