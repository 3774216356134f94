"""The arguments of ``fleetpipe launch``, named as in Paddle's launcher if Paddle has them."""

from __future__ import annotations

import argparse

from fleetpipe import arguments as kinds
from fleetpipe import systems
from fleetpipe.extras import extra
from fleetpipe.launch.script import add_script


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``fleetpipe launch`` to its parser.

    Raises:
        UsageError: This system cannot run several ranks.
    """
    systems.require_ranks()
    add = parser.add_argument
    add(
        "--nproc",
        *kinds.spellings("nproc_per_node"),
        dest="nproc_per_node",
        type=kinds.processes,
        metavar="N",
        help="processes on each host (default: one for each device)",
    )
    add(
        "--nnodes",
        type=_read_nodes,
        default=(1, 1),
        metavar="N|MIN:MAX",
        help="how many hosts take part, or between how many, with --ray (default: 1)",
    )
    for name in ("master", "host", "elastic_timeout", "neighbour_every"):
        add(*kinds.spellings(name), type=_refuse_host_option, help=argparse.SUPPRESS)
    add(
        *kinds.spellings("max_restart"),
        type=kinds.count,
        default=3,
        metavar="R",
        help="how often a job that fails is started again (default: %(default)s)",
    )
    add(
        *kinds.spellings("checkpoint_dir"),
        metavar="FOLDER",
        help="where fleetpipe.resume keeps checkpoints (default: $FLEETPIPE_CHECKPOINT_DIR, "
        "else checkpoints)",
    )
    add(
        *kinds.spellings("keep_state"),
        action="store_true",
        help="keep the state after every step in this host's memory: no step is lost",
    )
    add(
        "--heal",
        action="store_true",
        help="keep the state of every step, and put a new process in the place of a rank that "
        "dies, while the others wait in theirs; what cannot heal is started again",
    )
    add(
        "--least",
        type=kinds.positive,
        metavar="N",
        help="keep the state of every step, and go on from it with fewer ranks, N at least, where "
        "a rank dies twice in the same place: with fewer replicas if dp_degree is -1, else stages",
    )
    add(
        *kinds.spellings("wider_after"),
        type=kinds.seconds,
        default=600.0,
        metavar="SECONDS",
        help="after how long a job with fewer ranks tries all again (default: %(default)s)",
    )
    add(
        "--grace",
        type=kinds.seconds,
        default=60.0,
        metavar="SECONDS",
        help="how long ranks that are asked to stop may take to finish the step and save "
        "(default: %(default)s)",
    )
    extra("view").configure_serve(parser)
    add_script(parser, "a training script", "where each process leaves its log")


def _read_nodes(text: str) -> tuple[int, int]:
    """Reads a number of hosts, or "LEAST:MOST"; returns the least and the largest number."""
    least, colon, most = text.partition(":")
    most = most if colon else least
    if not least.isdecimal() or not most.isdecimal():
        raise argparse.ArgumentTypeError(f"invalid: {text!r}; give 2, or 1:4")
    numbers = int(least), int(most)
    if not 1 <= numbers[0] <= numbers[1]:
        raise argparse.ArgumentTypeError(f"invalid: {text!r}; give at least 1, no fewer at most")
    return numbers


def _refuse_host_option(_: str) -> None:
    """Raises the error for an option of several hosts, which the command no longer has."""
    raise argparse.ArgumentTypeError("several hosts are nodes of a Ray cluster: give --ray ADDRESS")
