"""A cluster of a job's own: nobody else's, and gone with the job; addresses that lead nowhere."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'fleetpipe[ray]'")

from ray.train import RunConfig

from fleetpipe.contrib.ray import PaddleConfig, PaddleTrainer, paddle_trainer, ray_cluster, reaper
from fleetpipe.contrib.ray.paddle_trainer import replicas
from fleetpipe.errors import ConfigError
from tests.fixtures import Patch
from tests.launching import ROOT

#: Starts a cluster, tells of it, and waits; a worker has forked a process of its own session.
OWNER = """
import json, os, subprocess, sys, time
from fleetpipe.contrib.ray import ray_cluster

with ray_cluster.connect(None, {"CPU": 1}):
    import ray

    @ray.remote
    class Worker:
        def fork(self):
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            return child.pid, os.environ["RAY_AUTH_TOKEN"]

    worker = Worker.remote()
    child, token = ray.get(worker.fork.remote())
    print(json.dumps([ray.get_runtime_context().gcs_address, child, token]), flush=True)
    assert "RAY_AUTH_TOKEN" not in os.environ
    sys.stdin.read()
"""
#: Says how a cluster at an address takes a process.
STRANGER = """
import sys
from fleetpipe.contrib.ray import ray_cluster
from fleetpipe.errors import ConfigError
try:
    with ray_cluster.connect(sys.argv[1], {}):
        print("taken")
except ConfigError as error:
    print(error)
"""


def listening(address: str) -> set[str]:
    """The addresses at which anybody listens with the session's ports; those of Linux's table."""
    port = int(address.rpartition(":")[2])
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            local, state = (line.split()[i] for i in (1, 3))
            host, _, number = local.partition(":")
            if state == "0A" and int(number, 16) == port:
                found.add(host)
    return found


@pytest.mark.processes
def test_the_script_of_the_page_runs_where_no_cluster_is(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "ray.md").read_text(encoding="utf-8")
    script = page.split("```python\n")[1].split("```")[0]
    (tmp_path / "train.py").write_text(script.replace("/tmp/results", str(tmp_path / "results")))
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_worker_niceness": "0"},
    )
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()[-1]
    assert "'step': 10" in told
    kept = {path.name for path in (tmp_path / "results" / "sums").glob("checkpoint_2*")}
    assert len(kept) == 2
    assert max(kept) in told


@pytest.mark.processes
def test_an_own_cluster_takes_no_stranger_and_ends_with_its_driver() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "token"}
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert owner.stdout is not None
        address, child, token = json.loads(owner.stdout.readline())
        # 127.0.0.1 in the table of IPv4, and as it stands in that of IPv6.
        assert listening(address) <= {"0100007F", "0000000000000000FFFF00000100007F"}
        stranger = subprocess.run(
            [sys.executable, "-c", STRANGER, address],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env={**environment, "RAY_AUTH_TOKEN": "0" * 64},
        )
        refused = f"the Ray cluster at {address!r} does not take this process: it has another token"
        assert stranger.stdout.startswith(refused)
        assert child in reaper.processes_with(token.encode())
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    deadline = time.monotonic() + 30
    while left := [*reaper.processes_with(token.encode())]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_other_versions_than_the_clusters_are_named(monkeypatch: Patch) -> None:
    def init(*_: object, **__: object) -> None:
        raise RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.59.0")

    monkeypatch.setattr(ray_cluster.ray, "init", init)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        refused = pytest.raises(ConfigError, match=r"has other versions.*\n.*Ray: 2\.59\.0")
        with refused, ray_cluster.connect(address, {}):
            pass


def test_a_shutdown_that_waits_for_ever_is_not_waited_for(monkeypatch: Patch) -> None:
    waits = threading.Event()
    monkeypatch.setattr(ray_cluster, "_LEAVE_SECONDS", 0.1)
    monkeypatch.setattr(ray_cluster.ray, "shutdown", waits.wait)
    ray_cluster._disconnect()
    assert not waits.is_set()
    waits.set()


def test_where_no_ray_is_says_so_at_once() -> None:
    began = time.monotonic()
    address = f"127.0.0.1:{paddle_trainer.free_ports(1)[0]}"
    with pytest.raises(ConfigError, match=address), ray_cluster.connect(address, {}):
        pass
    with (
        pytest.raises(ConfigError, match=r"'nowhere' does not answer\n  got: no port"),
        ray_cluster.connect("nowhere", {}),
    ):
        pass
    assert time.monotonic() - began < 10


def test_a_storage_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    trainer = PaddleTrainer(
        lambda: None, run_config=RunConfig(storage_path=str(tmp_path / "file" / "below"))
    )
    with pytest.raises(ConfigError, match=r"storage_path cannot be written: .*below"):
        trainer.fit()
    relative = PaddleTrainer(lambda: None, run_config=RunConfig(storage_path="results"))
    with pytest.raises(ConfigError, match=r"cannot be written: results\n(.|\n)*absolute path"):
        relative.fit()


@pytest.mark.parametrize(
    "configs", [{"paddle_config": {"pp_degree": 2}}, {"train_loop_config": ["rate"]}]
)
def test_a_config_of_another_type_is_refused(configs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(configs))} is no "):
        PaddleTrainer(lambda: None, **configs)


def test_degrees_that_do_not_fit_are_refused() -> None:
    from ray.train import ScalingConfig

    with pytest.raises(ConfigError, match=r"num_workers \(=3\) does not fit"):
        PaddleTrainer(
            lambda: None,
            scaling_config=ScalingConfig(num_workers=3),
            paddle_config=PaddleConfig(hybrid_configs={"pp_degree": 2, "dp_degree": -1}),
        )
    with pytest.raises(ConfigError, match=r"no option 'pp_degre'\n(.|\n)*'pp_degree'"):
        PaddleConfig(hybrid_configs={"pp_degre": 2})
    # As with a strategy, dp_degree is worked out where nothing says what it is.
    assert replicas({"pp_degree": 2}, 4) == [0, 0, 1, 1]
    with pytest.raises(ConfigError, match="needs to know which ranks are one replica"):
        PaddleTrainer(
            lambda: None,
            scaling_config=ScalingConfig(num_workers=2),
            datasets={"train": lambda: None},
        )
