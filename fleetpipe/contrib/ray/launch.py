"""``fleetpipe launch --ray``: runs an unedited script as the loop of a ``PaddleTrainer``.

Ray places the ranks, restarts all of them if one fails, and changes their number as the cluster
grows or shrinks.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError

from fleetpipe.arguments import Module
from fleetpipe.contrib.ray.paddle_trainer import PaddleConfig, PaddleTrainer
from fleetpipe.contrib.ray.ray_cluster import connect
from fleetpipe.contrib.view import SERVE
from fleetpipe.errors import ConfigError, FleetPipeError
from fleetpipe.job import attempt_files
from fleetpipe.launch import script, streams
from fleetpipe.launch.supervisor.supervisor import say

#: How variables of this process begin that ranks get whatever their node has set.
_PASSED_ON = (
    *("FLEETPIPE_", "PADDLE_", "FLAGS_", "GLOG_", "GLOO_", "NCCL_", "OMP_", "MKL_"),
    "PYTHON",
)
#: Variables that ranks do not get, since they belong to this process or host.
_OF_HOST = ("RAY_", "LD_", "SLURM_")
#: Options that only the launcher of one host has, each with its default and what to do instead.
_OF_ONE_HOST = {
    "keep_state": (
        False,
        "leave it out: ranks go on from the newest checkpoint; CheckpointManager(save_interval=) "
        "says how many steps that costs at most",
    ),
    "heal": (False, "leave it out: Ray starts all workers again when one fails"),
    "least": (
        None,
        "leave it out: a node takes what its ranks kept with it; --nnodes MIN:MAX goes on from the "
        "newest checkpoint with as many ranks as there is room for",
    ),
    "wider_after": (600.0, "leave it out: Ray looks for more nodes once a minute"),
    "grace": (60.0, "leave it out: Ray ends ranks without asking them to save"),
    "log_dir": (
        "log",
        "leave it out: this command shows what ranks write, and Ray keeps it on each node, in "
        "/tmp/ray/session_latest/logs",
    ),
}


def run(options: argparse.Namespace) -> int:
    """Runs a job on a Ray cluster to its end.

    Returns:
        0 if every rank did its work; 130 after Ctrl-C; 1 if the job failed.

    Raises:
        ConfigError: An option is for a single host, there is no Ray at the address, or its nodes
            lack room or packages.
    """
    for name, (usual, fix) in _OF_ONE_HOST.items():
        if getattr(options, name) != usual:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"fleetpipe launch --ray does not take {option}", fix=fix)
    address = None if options.ray == "local" else options.ray
    most = options.nnodes[1] * (options.nproc_per_node or 1)
    with tempfile.TemporaryDirectory() as runs, connect(address, {"CPU": most}):
        try:
            _make_trainer(options, runs).fit()
        except TrainingFailedError as error:
            say(str(error).rstrip())
            return 1
        except SystemExit:  # Ray raises it at Ctrl-C
            say("interrupted")
            return attempt_files.INTERRUPTED
    return 0


def _make_trainer(options: argparse.Namespace, runs: str) -> PaddleTrainer:
    """Returns the trainer of the job, for the cluster that this process is connected to.

    Args:
        options: The options of ``fleetpipe launch``.
        runs: A folder for the files of Ray Train's run.
    """
    gpus = [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]
    ranks_of_node = options.nproc_per_node or min(filter(None, gpus), default=1)
    least, most = (nodes * ranks_of_node for nodes in options.nnodes)
    script_path = options.script  # or the name of a module
    if not isinstance(script_path, Module):
        script_path = os.path.abspath(script_path)
    return PaddleTrainer(
        run_script,
        train_loop_config={
            "script": script_path,
            "arguments": options.arguments,
            "folder": os.getcwd(),
            "log_level": options.log_level,
            "environment": {n: v for n, v in os.environ.items() if not n.startswith(_OF_HOST)},
        },
        scaling_config=ScalingConfig(
            num_workers=most if least == most else (least, most), use_gpu=any(gpus)
        ),
        run_config=RunConfig(
            name="job",
            storage_path=runs,  # nothing is reported there
            failure_config=FailureConfig(max_failures=options.max_restart),
            worker_runtime_env={"env_vars": _rank_environment(options)},
        ),
        paddle_config=PaddleConfig(wait_for_nodes=options.wait),
    )


def _rank_environment(options: argparse.Namespace) -> dict[str, str]:
    """Returns the environment variables that every rank gets, even if its node has set others."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
    # Else Ray shows the script's output twice.
    variables["RAY_TRAIN_ENABLE_PRINT_PATCH"] = "0"
    if options.checkpoint_dir is not None:
        variables["FLEETPIPE_CHECKPOINT_DIR"] = os.path.abspath(options.checkpoint_dir)
    if options.serve is not None:
        variables[SERVE] = str(options.serve)  # the first rank serves, on its node
    return variables


def run_script(config: Mapping[str, Any]) -> None:
    """Runs a script as ``fleetpipe run`` does; it is the train loop of each worker.

    Args:
        config: The ``script``, its ``arguments``, the ``folder`` that it runs in if the node has
            it, the ``log_level``, and the ``environment`` for variables that the node has not set.

    Raises:
        FleetPipeError: The script exited with a code other than 0. Its own exceptions pass.
    """
    from fleetpipe.launch.substitution import in_place_of_paddles

    for name, value in config["environment"].items():
        os.environ.setdefault(name, value)
    if os.path.isdir(config["folder"]):
        os.chdir(config["folder"])
    with streams.quiet(config["log_level"]), in_place_of_paddles():
        try:
            script.execute(config["script"], config["arguments"])
        except SystemExit as stop:
            if code := script.exit_code(stop.code):
                raise FleetPipeError(f"the script ended with {code}") from None
    sys.stdout.flush()
