"""The command line: a table of subcommands, each of which lives beside what it commands."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fleetpipe.errors import FleetPipeError, ScheduleError


class Command(NamedTuple):
    """A subcommand.

    Args:
        name: What the user types.
        help: One line for ``fleetpipe --help``.
        configure: ``module:function``, imported when the command is used. The function takes the
            subcommand's parser, adds its arguments, and sets the default ``run`` to a function
            that takes the parsed arguments and returns the exit code.
    """

    name: str
    help: str
    configure: str


COMMANDS = (
    Command(
        "schedule",
        "build, verify, simulate and draw a schedule",
        "fleetpipe.schedules.commands:configure_schedule",
    ),
    Command(
        "verify",
        "verify a schedule or a plan in text form",
        "fleetpipe.schedules.commands:configure_verify",
    ),
    Command(
        "run",
        "run an unedited script that imports paddle.distributed.fleet",
        "fleetpipe.running.command:configure",
    ),
    Command(
        "parity",
        "run a training script beside its single-device model and compare every bit",
        "fleetpipe.parity.command:configure",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: Arguments without the program's name; None means those of the process.

    Returns:
        0 done; 1 the schedule is invalid or parity fails; 2 usage, or a refused request.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    parser = _parser(words)
    try:
        arguments = parser.parse_args(words)
        run: Callable[[argparse.Namespace], int] = arguments.run
        code = run(arguments)
        sys.stdout.flush()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    except BrokenPipeError:
        # The reader, say `head`, has seen enough. Python flushes stdout once more at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (FleetPipeError, OSError, UnicodeDecodeError) as error:
        print(f"fleetpipe: {error}", file=sys.stderr)
        return 1 if isinstance(error, ScheduleError) else 2
    return code


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fleetpipe", description="Pipeline parallelism for PaddlePaddle."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        sub = commands.add_parser(command.name, help=command.help, description=command.help)
        if command.name in words[:1]:
            module, _, function = command.configure.partition(":")
            getattr(importlib.import_module(module), function)(sub)
    return parser
