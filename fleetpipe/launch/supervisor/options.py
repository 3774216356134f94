"""The arguments of ``fleetpipe launch``: Paddle's own where Paddle has them, spelled as there."""

from __future__ import annotations

import argparse

from fleetpipe import arguments as kinds
from fleetpipe.launch import quiet


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``fleetpipe launch`` to its parser."""
    add = parser.add_argument
    add(
        *_spelled("nproc_per_node"),
        type=kinds.processes,
        metavar="N",
        help="processes on this host (default: one for each device)",
    )
    add(
        *_spelled("max_restart"),
        type=kinds.count,
        default=3,
        metavar="R",
        help="how often a job that fails is started again (default: %(default)s)",
    )
    add(
        *_spelled("checkpoint_dir"),
        metavar="FOLDER",
        help="where fleetpipe.resume keeps checkpoints (default: $FLEETPIPE_CHECKPOINT_DIR, "
        "else checkpoints)",
    )
    add(
        *_spelled("keep_state"),
        action="store_true",
        help="keep the state after every step in this host's memory: no step is lost",
    )
    add(
        "--grace",
        type=kinds.seconds,
        default=60.0,
        metavar="SECONDS",
        help="how long ranks that are asked to stop may take to finish the step and save "
        "(default: %(default)s)",
    )
    add(
        *_spelled("log_dir"),
        default="log",
        metavar="FOLDER",
        help="where each process leaves its log (default: %(default)s)",
    )
    add(
        *_spelled("log_level"),
        choices=quiet.LEVELS,
        default=quiet.DEFAULT_LEVEL,
        help="least level of Paddle's own log lines to show (default: %(default)s)",
    )
    add("script", type=kinds.script, metavar="SCRIPT", help="a training script")
    rest = add(
        "arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="arguments of the script"
    )
    rest.required = False  # or a missing SCRIPT is reported with these


def _spelled(name: str) -> tuple[str, str]:
    """Returns an option as Paddle spells it, and as fleetpipe's other commands do."""
    return f"--{name}", f"--{name.replace('_', '-')}"
