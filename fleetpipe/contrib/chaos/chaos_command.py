"""``fleetpipe chaos``: launches a job, and kills or stops a rank in each of its attempts."""

from __future__ import annotations

import argparse
import os
import re
import signal
from collections.abc import Callable

from fleetpipe import arguments as kinds
from fleetpipe import systems
from fleetpipe.contrib.chaos.strike import VARIABLE, Strike
from fleetpipe.launch.supervisor import options as supervisors
from fleetpipe.launch.supervisor import supervisor

_FORM = re.compile(r"rank=(\d+),at=(\S+)")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``fleetpipe chaos`` to its parser.

    Raises:
        UsageError: This system cannot run ranks.
    """
    systems.require_ranks()
    strikes = parser.add_mutually_exclusive_group(required=True)
    for name, number, what in (
        ("--kill", systems.SIGKILL, "killed"),
        ("--stop", signal.Signals["SIGSTOP"], "stopped, as if it hung"),
    ):
        strikes.add_argument(
            name,
            dest="strike",
            type=_reader(number),
            metavar="rank=R,at=OPERATION",
            help=f"which rank is {what}, before which operation of its plan: B1.3, STEP, ..",
        )
    parser.add_argument(
        "--every",
        type=kinds.positive,
        default=1,
        metavar="N",
        help="in the N-th step of every attempt (default: %(default)s)",
    )
    supervisors.configure(parser)


def _reader(number: signal.Signals) -> Callable[[str], Strike]:
    """Returns a function that reads the argument of the option for the signal ``number``."""

    def read(text: str) -> Strike:
        match = _FORM.fullmatch(text)
        if match is None:
            raise argparse.ArgumentTypeError(f"invalid: {text!r}; give rank=1,at=B1.3")
        return Strike(number, int(match[1]), match[2], 1)

    return read


def run(options: argparse.Namespace) -> int:
    """Runs the job; returns the exit code of ``fleetpipe launch``."""
    os.environ[VARIABLE] = str(options.strike._replace(every=options.every))
    return supervisor.run(options)
