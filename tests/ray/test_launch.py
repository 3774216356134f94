"""A script that knows nothing of Ray, on two nodes of a cluster on this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'fleetpipe[ray]'")

from tests.launching import ROOT, Finished

_WORKER = ROOT / "tests" / "launch" / "resume_worker.py"
_STEPS = "8"
_LIMIT_SECONDS = 240
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
    stop_at: str = "",
    happens: Callable[[subprocess.Popen[str]], object] = subprocess.Popen.terminate,
) -> tuple[int, str]:
    """Runs ``fleetpipe launch --ray``; once a line begins with ``stop_at`` something happens."""
    command = [sys.executable, "-m", "fleetpipe", "launch", "--ray", address, *words]
    lines = []
    with subprocess.Popen(
        command,
        cwd=folder,
        env={**_ENVIRONMENT, "RESUME_WORKER_PAUSE": "0.3", "RESUME_WORKER_SAVES": "100"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if stop_at and line.startswith(stop_at):
                happens(process)
                stop_at = ""
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


def test_a_job_loses_a_rank_is_asked_to_stop_and_goes_on_with_its_bits(
    address: str, tmp_path: Path, launch: Callable[..., Finished]
) -> None:
    size = ("--nnodes", "2", "--nproc", "1", "--checkpoint_dir", "kept")
    script = (str(_WORKER), _STEPS, "1.1.3=9")
    code, output = _launch(tmp_path, address, *size, "--keep_state", *script, stop_at="step 4 ")
    assert code == 75, output
    # A rank that is killed costs no step, and says so by one that is left.
    assert "fleetpipe: attempt 1 ended in step 3: rank 1 died (was ended by SIGKILL)" in output
    assert "attempt 2 begins: restart 1 of 3" in output
    assert "goes on after 3 steps, as they were kept in memory" in output
    assert "asked to stop, the job saved " in output
    logs = [(tmp_path / "log" / f"workerlog.{rank}").read_text() for rank in range(2)]
    assert all("step 2 " in log and "step 4 " in log for log in logs)

    code, output = _launch(tmp_path, address, *size, *script)
    assert code == 0, output
    assert "step 3 " not in output
    assert _bits(output) == _bits(launch(_WORKER, None, args=[_STEPS]).logs[0]) != []
    assert _left(tmp_path) == []


def test_a_cluster_that_is_too_small_is_told_before_anything_starts(
    address: str, tmp_path: Path
) -> None:
    code, output = _launch(tmp_path, address, "--nnodes", "3", "--wait", "0", str(_WORKER), _STEPS)
    assert code == 2
    assert "the Ray cluster is too small for the job" in output
    assert "expected: 3 nodes with 1 CPU each" in output
    assert not (tmp_path / "log").exists()


def test_after_a_lost_node_ranks_go_on_from_a_copy_with_their_bits(
    cluster: tuple[str, IO[str]], tmp_path: Path, launch: Callable[..., Finished]
) -> None:
    address, orders = cluster

    def lose(_: object) -> None:
        orders.write("lose a node\n")
        orders.flush()

    size = ("--nnodes", "2", "--nproc", "1", "--wait", "60", "--checkpoint_dir", "kept")
    script = (str(_WORKER), "24")
    words = (*size, "--keep_state", *script)
    code, output = _launch(tmp_path, address, *words, stop_at="step 12 ", happens=lose)
    assert code == 0, output
    assert re.search(r"goes on after [12]0 steps, as they were kept in memory", output), output
    assert _bits(output) == _bits(launch(_WORKER, None, args=["24"]).logs[0]) != []
