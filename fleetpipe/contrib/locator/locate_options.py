"""``fleetpipe locate``: its arguments, and the settings that it passes to its processes.

These run a script as a job, on its ranks, or as the job's twin: the same script on one device.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from fleetpipe import arguments as kinds
from fleetpipe.launch.script import configure_script

#: The environment variable that tells a process of a script what to record.
SETTING = "FLEETPIPE_LOCATE"
#: Seconds within which a run must finish a step.
TIMEOUT = 600.0


class Setting(NamedTuple):
    """What one process of a script has to record.

    Attributes:
        folder: The folder of the record.
        steps: The number of steps.
        job: For a twin: the folder of the job whose values it uses; "" for the job itself.
        perturbed: For a twin: whether its numbers are changed by a unit in the last place.
        automatic: For a twin: whether ``fleet.init`` is made to set all degrees to 1; if not, the
            user's options do.
    """

    folder: str
    steps: int
    job: str = ""
    perturbed: bool = False
    automatic: bool = True


def assignment(text: str) -> str:
    """Returns an argument ``NAME=VALUE`` as it is, whose value may be empty.

    Raises:
        argparse.ArgumentTypeError: The text has another form.
    """
    name, equals, _ = text.partition("=")
    if not (equals and name.isidentifier()):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE: give DEGREES= or PP=1")
    return text


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``fleetpipe locate`` to its parser."""
    parser.add_argument(
        "--twin",
        action="append",
        type=assignment,
        metavar="NAME=VALUE",
        help="environment variable with which the script runs at degrees 1; may be given again",
    )
    parser.add_argument(
        "--twin-arguments",
        metavar="ARGUMENTS",
        help="arguments, behind the others, with which the script runs at degrees 1",
    )
    parser.add_argument(
        "--steps", type=kinds.positive, default=4, metavar="N", help="steps (default: %(default)s)"
    )
    parser.add_argument(
        "--record", type=Path, metavar="FOLDER", help="keep what job and twin have computed"
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="FOLDER",
        help="compare with the twin of a record, of another version or commit, and run none",
    )
    parser.add_argument(
        "--timeout",
        type=kinds.seconds,
        default=TIMEOUT,
        metavar="SECONDS",
        help="end a run that finishes no step within so long (default: %(default)g)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the first place as JSON, or null"
    )
    configure_script(parser, "a training script that uses fleetpipe.fleet, or Paddle's")
