"""Runs jobs on a Ray cluster: a trainer of Ray Train whose workers are the ranks.

Start with ``paddle_trainer.py``: a user calls it, and it tells each worker which rank it is. Needs
``pip install 'fleetpipe[ray]'``; neither Ray nor Paddle is imported before a name needs it. This
file has the command ``fleetpipe launch``, which runs a job by the local launcher, or with ``--ray``
by Ray Train.
"""

from __future__ import annotations

import argparse
import importlib
from typing import TYPE_CHECKING

from fleetpipe import arguments as kinds
from fleetpipe.errors import UsageError
from fleetpipe.extras import late
from fleetpipe.launch.supervisor import options as supervisors

if TYPE_CHECKING:
    from fleetpipe.contrib.ray.checkpoints import RayCheckpointManager as RayCheckpointManager
    from fleetpipe.contrib.ray.checkpoints import ReportCallback as ReportCallback
    from fleetpipe.contrib.ray.paddle_trainer import PaddleConfig as PaddleConfig
    from fleetpipe.contrib.ray.paddle_trainer import PaddleTrainer as PaddleTrainer


#: The public names, which are loaded when they are first used, with their modules.
_LATE = {
    "PaddleConfig": "fleetpipe.contrib.ray.paddle_trainer",
    "PaddleTrainer": "fleetpipe.contrib.ray.paddle_trainer",
    "RayCheckpointManager": "fleetpipe.contrib.ray.checkpoints",
    "ReportCallback": "fleetpipe.contrib.ray.checkpoints",
}


if not TYPE_CHECKING:  # to a type checker it would give the module every name
    __getattr__ = late(_LATE)


def __dir__() -> list[str]:
    """Returns the public names."""
    return sorted(_LATE)


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``fleetpipe launch`` to its parser."""
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="run on the nodes of the Ray cluster at HOST:PORT; auto: the one that ray start began "
        "here; local: one of the job's own, on this host",
    )
    parser.add_argument(
        "--wait",
        type=kinds.seconds,
        default=10.0,
        metavar="SECONDS",
        help="with --ray: how long to wait for nodes that the cluster lacks (default: %(default)s)",
    )
    supervisors.configure(parser)


def run(options: argparse.Namespace) -> int:
    """Runs a job to its end; returns the exit code that its launcher describes.

    Raises:
        UsageError: ``--ray`` is given, and Ray is not installed.
        FleetPipeError: The launcher refuses the job.
    """
    local = options.ray is None
    name = "fleetpipe.launch.supervisor.supervisor" if local else "fleetpipe.contrib.ray.launch"
    try:
        return int(importlib.import_module(name).run(options))
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] != "ray":
            raise
        raise UsageError(
            "fleetpipe launch --ray needs Ray Train, which is not installed",
            fix="pip install 'fleetpipe[ray]', on every node",
        ) from error
