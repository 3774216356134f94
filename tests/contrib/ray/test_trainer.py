"""Trainings on two nodes of one machine, whose workers die."""

from __future__ import annotations

import ast
import signal
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'fleetpipe[ray]'")

import ray
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig

from fleetpipe import fleet
from fleetpipe.contrib.ray import PaddleConfig, PaddleTrainer, ray_cluster
from fleetpipe.errors import ConfigError
from tests.contrib.ray import loops
from tests.fit.test_model import Losses
from tests.fixtures import Patch
from tests.launching import ROOT

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as changes:
        changes.setenv("PYTHONPATH", str(ROOT))
        changes.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
        # Ray's own is behind all else of a machine, which tests have to themselves at most.
        changes.setenv("RAY_worker_niceness", "0")
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 3})
        nodes.add_node(num_cpus=2)
        ray.init(nodes.address, logging_level="WARNING", log_to_driver=False)
        yield nodes
        ray.shutdown()
        nodes.shutdown()


def run_config(folder: Path, failures: int = 0) -> RunConfig:
    return RunConfig(
        name="run",
        storage_path=str(folder / "storage"),
        failure_config=FailureConfig(max_failures=failures),
    )


def test_fit_reports_and_goes_on_with_its_bits(two_nodes: Any, tmp_path: Path) -> None:
    result = PaddleTrainer(
        loops.fit,
        train_loop_config={"log": str(tmp_path), "at": 2},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=run_config(tmp_path, failures=1),
    ).fit()
    assert (tmp_path / "asked.1").exists()
    assert result.metrics.keys() == {"step", "loss", "acc"}
    assert result.metrics["step"] == 8
    losses = Losses()
    loops.fit_with(losses)
    fleet.shutdown()
    # Every second batch, and both epochs of four.
    steps = [2, 4, 4, 6, 8, 8]
    reported = [(metrics["step"], metrics["loss"]) for _, metrics in result.best_checkpoints]
    assert reported == [(step, losses.train[step - 1]["loss"][0]) for step in steps]


def test_replicas_read_different_rows_and_their_ranks_the_same(
    two_nodes: Any, tmp_path: Path
) -> None:
    interrupt = signal.getsignal(signal.SIGINT)
    PaddleTrainer(
        loops.read,
        # Rank 1 is lost while it starts, which costs no failure.
        train_loop_config={"log": str(tmp_path), "dies": loops.DiesWhereItIsRead(str(tmp_path))},
        scaling_config=ScalingConfig(num_workers=4),
        run_config=run_config(tmp_path),
        # The ranks of a replica are not next to each other: they are 0 and 2, 1 and 3.
        paddle_config=PaddleConfig(hybrid_configs={"pp_degree": 2, "sharding_degree": 2}),
        datasets={"train": lambda: ray.data.range(16)},
    ).fit()
    assert (tmp_path / "asked.1").exists()
    # Ctrl-C after a run is the script's again.
    assert signal.getsignal(signal.SIGINT) is interrupt
    rows = [ast.literal_eval((tmp_path / f"rows.{rank}").read_text()) for rank in range(4)]
    assert rows[0] == rows[2]
    assert rows[1] == rows[3]
    of_replica = [[[*chain(*epoch)] for epoch in rows[rank]] for rank in (0, 1)]
    assert sorted(of_replica[0][0] + of_replica[1][0]) == list(range(16))
    assert all(len(epoch) == 8 for epochs in of_replica for epoch in epochs)


def test_more_ranks_than_the_nodes_have_room_for_are_refused(
    two_nodes: Any, tmp_path: Path
) -> None:
    trainer = PaddleTrainer(
        loops.read,
        train_loop_config={},
        scaling_config=ScalingConfig(num_workers=3, resources_per_worker={"CPU": 2}),
        run_config=run_config(tmp_path),
        paddle_config=PaddleConfig(wait_for_nodes=0),
    )
    refused = pytest.raises(ConfigError, match=r"has room for 2 worker\(s\), 3 are asked for")
    with refused as told:
        trainer.fit()
    (got,) = [line for line in str(told.value).splitlines() if line.startswith("  got: ")]
    assert "CPU 2" in got
    assert "CPU 3" in got


def test_a_package_that_a_node_does_not_have_is_named(two_nodes: Any, monkeypatch: Patch) -> None:
    ray_cluster.require_packages()
    monkeypatch.setitem(ray_cluster.NEEDED, "not_there", "")
    with pytest.raises(ConfigError, match=r"on the node .*: no package 'not_there'"):
        ray_cluster.require_packages()
    monkeypatch.setitem(ray_cluster.NEEDED, "fleetpipe", "0.0.1")
    with pytest.raises(ConfigError, match=r"another version of fleetpipe than 0\.0\.1"):
        ray_cluster.require_packages()
