"""A script that knows nothing of Ray, on its nodes, and what its ranks are told."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'fleetpipe[ray]'")

from fleetpipe import cli
from fleetpipe.contrib.ray import launch as ray_launch
from fleetpipe.contrib.ray import paddle_trainer
from fleetpipe.contrib.ray.paddle_trainer import RankPlace, rank_environments
from fleetpipe.errors import FleetPipeError
from tests.fixtures import Capture, Patch
from tests.launching import ROOT, Finished

_WORKER = ROOT / "tests" / "launch" / "resume_worker.py"
#: The worker, whose second start is not the first one again.
_SCRIPT = """
import os
from tests.launch import resume_worker
from tests.contrib.ray.loops import first
os.environ["FLEETPIPE_INCARNATION"] = "1" if first(".", resume_worker.RANK) else "2"
resume_worker.main()
"""


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_script_that_loses_a_rank_goes_on_with_its_bits(
    tmp_path: Path, launch: Callable[..., Finished]
) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)
    command = [sys.executable, "-m", "fleetpipe", "launch", "--ray", "local", "--nproc", "2"]
    command += ["--checkpoint_dir", "kept", "train.py", "6", "1.1.4=9"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_worker_niceness": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    output = done.stdout
    assert done.returncode == 0, output
    assert "goes on after 3 steps" in output
    (bits,) = {line[line.index("bits ") :] for line in output.splitlines() if "bits " in line}
    assert bits in launch(_WORKER, None, args=["6"]).logs[0]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--keep_state"], "--keep-state\n  what to do: leave it out: ranks go on from the newest"),
        (["--heal"], "--heal\n  what to do: leave it out: Ray starts all workers again"),
        (["--least", "1"], "--least\n  what to do: leave it out: a node takes what its ranks kept"),
        (["--grace", "5"], "--grace\n  what to do: leave it out: Ray ends ranks without asking"),
        (["--log-dir", "x"], "--log-dir\n  what to do: leave it out: this command shows"),
    ],
)
def test_what_ray_does_not_do_is_refused(
    words: list[str], told: str, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "train.py").touch()
    assert cli.main(["launch", "--ray", "local", *words, str(tmp_path / "train.py")]) == 2
    assert f"fleetpipe launch --ray does not take {told}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("nnodes", "nproc", "gpus", "ranks"),
    [
        ((1, 1), None, [0], 1),
        ((2, 2), 4, [0, 0], 8),
        ((1, 4), 2, [0], (2, 8)),
        ((2, 2), None, [0, 8, 4], 8),
    ],
)
def test_the_options_are_those_of_a_trainer(
    nnodes: tuple[int, int], nproc: int | None, gpus: list[int], ranks: Any, monkeypatch: Patch
) -> None:
    nodes = [{"Alive": True, "Resources": {"CPU": 9, "GPU": number}} for number in gpus]
    monkeypatch.setattr(ray_launch.ray, "nodes", lambda: nodes)
    monkeypatch.setenv("FLAGS_of_the_test", "1")
    monkeypatch.setenv("OF_THE_TEST", "1")
    options = Namespace(
        nnodes=nnodes,
        nproc_per_node=nproc,
        max_restart=5,
        wait=7.0,
        script=Path("train.py"),
        arguments=["--rate", "1"],
        log_level="WARNING",
        checkpoint_dir="kept",
        serve=None,
    )
    trainer = ray_launch._make_trainer(options, "/tmp/runs")
    scaling, run = trainer.scaling_config, trainer.run_config
    assert (scaling.num_workers, scaling.use_gpu) == (ranks, any(gpus))
    assert run.failure_config.max_failures == 5
    assert trainer.backend_config.wait_for_nodes == 7.0
    environment = run.worker_runtime_env["env_vars"]
    assert environment["FLAGS_of_the_test"] == "1"
    assert environment["FLEETPIPE_CHECKPOINT_DIR"] == os.path.abspath("kept")
    assert "OF_THE_TEST" not in environment
    assert trainer.train_loop_config["script"] == os.path.abspath("train.py")


@pytest.mark.parametrize(
    ("ends", "raises"),
    [
        ("sys.exit(0)", None),
        ("sys.exit(3)", (FleetPipeError, "the script ended with 3")),
        ("raise KeyError('x')", (KeyError, "x")),
    ],
)
def test_a_script_fails_as_a_train_loop_does(
    ends: str, raises: Any, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        f"import sys\nfrom paddle.distributed import fleet\nprint(fleet.__name__, sys.argv)\n"
        f"import os\nassert os.environ['PATH'] != 'x'\n{ends}"
    )
    config = {"script": "train.py", "arguments": ["a"], "folder": ".", "log_level": "WARNING"}
    config |= {"environment": {"PATH": "x"}}
    if raises is None:
        ray_launch.run_script(config)
    else:
        with pytest.raises(raises[0], match=raises[1]):
            ray_launch.run_script(config)
    assert capsys.readouterr().out == "fleetpipe.fleet ['train.py', 'a']\n"


def test_each_rank_is_told_where_all_of_them_are() -> None:
    places = [
        RankPlace("a", "10.0.0.1", ""),
        RankPlace("b", "10.0.0.2", ""),
        RankPlace("b", "10.0.0.2", ""),
    ]
    told = rank_environments(places, {"a": [20001, 20002], "b": [20003, 20004, 20005]})
    assert [rank["PADDLE_CURRENT_ENDPOINT"] for rank in told] == [
        *("10.0.0.1:20001", "10.0.0.2:20003", "10.0.0.2:20004")
    ]
    assert {rank["PADDLE_TRAINER_ENDPOINTS"] for rank in told} == {
        "10.0.0.1:20001,10.0.0.2:20003,10.0.0.2:20004"
    }
    # Paddle's own store is not where the job's is.
    assert {rank["PADDLE_MASTER"] for rank in told} == {"10.0.0.1:20002"}
    assert [rank["PADDLE_LOCAL_RANK"] for rank in told] == ["0", "0", "1"]
    assert [rank["PADDLE_LOCAL_SIZE"] for rank in told] == ["1", "2", "2"]
    assert {rank["PADDLE_NNODES"] for rank in told} == {"2"}


def test_all_nodes_look_for_ports_at_once(monkeypatch: Patch) -> None:
    asked: list[int] = []

    class Workers:
        def execute(self, _place: Any) -> list[RankPlace]:
            return [RankPlace(node, "10.0.0.1", "") for node in "aab"]

        def execute_single_async(self, worker: int, _find: Any, count: int) -> list[int]:
            asked.append(worker)
            return [*range(20000, 20000 + count)]

    def get(references: Any) -> Any:
        assert asked == [0, 2]
        return references

    monkeypatch.setattr(paddle_trainer.ray, "get", get)
    assert len(paddle_trainer.environments(Workers())) == 3


def test_only_ranks_without_a_gpu_meet_over_gloo() -> None:
    on_cpu, on_gpu = rank_environments(
        [RankPlace("a", "10.0.0.1", ""), RankPlace("a", "10.0.0.1", "3")],
        {"a": [20001, 20002, 20003]},
    )
    assert on_cpu["PADDLE_DISTRI_BACKEND"] == "gloo"
    assert on_gpu["FLAGS_selected_gpus"] == "3"
    assert not on_cpu.keys() & {"FLAGS_selected_gpus"}
    assert not on_gpu.keys() & {"PADDLE_DISTRI_BACKEND"}


def test_a_port_at_which_somebody_listens_is_not_given(monkeypatch: Patch) -> None:
    with socket.socket() as listening:
        listening.bind(("", 0))
        listening.listen()
        taken = listening.getsockname()[1]
        other = next(port for port in paddle_trainer.free_ports(2) if port != taken)
        monkeypatch.setattr(
            paddle_trainer, "_RANK_PORTS", range(min(taken, other), max(taken, other) + 1)
        )
        assert taken not in paddle_trainer.free_ports(1)
        monkeypatch.setattr(paddle_trainer, "_RANK_PORTS", range(taken, taken + 1))
        with pytest.raises(paddle_trainer.TransportError, match="too few free ports"):
            paddle_trainer.free_ports(1)
