"""``fleetpipe launch``: runs a job by the local launcher, or with ``--ray`` by Ray Train."""

from __future__ import annotations

import argparse
import importlib

from fleetpipe import arguments as kinds
from fleetpipe.errors import UsageError
from fleetpipe.launch.supervisor import options as supervisors


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
    name = "fleetpipe.launch.supervisor.supervisor"
    if options.ray is not None:
        name = "fleetpipe.contrib.ray.launch"
    try:
        return int(importlib.import_module(name).run(options))
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] != "ray":
            raise
        raise UsageError(
            "fleetpipe launch --ray needs Ray Train, which is not installed",
            fix="pip install 'fleetpipe[ray]', on every node",
        ) from error
