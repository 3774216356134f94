"""The command line ``fleetpipe``: a table of subcommands, each defined in its own package."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fleetpipe.errors import FleetPipeError, ScheduleError, nearest, printable
from fleetpipe.extras import needed_for
from fleetpipe.launch import streams
from fleetpipe.launch.streams import DEFAULT_LEVEL, quiet
from fleetpipe.version import __version__


class Command(NamedTuple):
    """A subcommand.

    Its functions are ``"module:function"``, which are imported when they are needed.

    Attributes:
        name: What the user types.
        help: One line for ``fleetpipe --help``.
        configure: A function ``configure(parser)`` that adds the subcommand's arguments. Its module
            loads no Paddle: help and usage errors need none.
        run: A function that takes the parsed arguments and returns the exit code; "" for the path
            in ``configure`` with the word ``configure`` replaced by ``run``.
    """

    name: str
    help: str
    configure: str
    run: str = ""


COMMANDS = (
    Command(
        "schedule",
        "build, verify, simulate and draw a schedule",
        "fleetpipe.schedules.schedule_commands:configure_schedule",
    ),
    Command(
        "verify",
        "verify a schedule or a plan in text form",
        "fleetpipe.schedules.schedule_commands:configure_verify",
    ),
    Command(
        "run",
        "run an unedited script that imports paddle.distributed.fleet",
        "fleetpipe.launch.script:configure_run",
        "fleetpipe.launch.script:run",
    ),
    Command(
        "launch",
        "run a script on the ranks of a job, and start it again where one fails",
        "fleetpipe.contrib.ray:configure",
    ),
    Command(
        "parity",
        "run a training script beside its single-device model and compare every bit",
        "fleetpipe.launch.script:configure_parity",
        "fleetpipe.parity.parity_command:run",
    ),
    Command(
        "locate",
        "name the first place where a job computes something else than one device does",
        "fleetpipe.contrib.locator.locate_options:configure",
        "fleetpipe.contrib.locator.locate_command:run",
    ),
    Command(
        "doctor",
        "say what this machine or cluster can do, and what is wrong with it",
        "fleetpipe.contrib.doctor.doctor_command:configure",
    ),
    Command(
        "profile",
        "measure what each layer of a training script's model costs",
        "fleetpipe.launch.script:configure_profile",
        "fleetpipe.launch.profile_command:run",
    ),
    Command(
        "plan",
        "find cut, placement, schedule and recompute for a profile, some ranks and their memory",
        "fleetpipe.profiling.plan_commands:configure_plan",
    ),
    Command(
        "estimate",
        "time and memory of a profile on several numbers of ranks, under every schedule",
        "fleetpipe.profiling.plan_commands:configure_estimate",
    ),
    Command(
        "checkpoint",
        "list, check, compare and convert the checkpoints of a run",
        "fleetpipe.checkpoint.checkpoint_commands:configure",
    ),
    Command(
        "hash",
        "one hash of a model, the same for every layout: of checkpoints and files of weights",
        "fleetpipe.checkpoint.hash_command:configure",
    ),
    Command(
        "new",
        "make a project to begin with: a training script, its settings, a test",
        "fleetpipe.contrib.starter:configure",
    ),
    Command(
        "report",
        "write the page of a run: curves, the pipeline's picture, memory, restarts",
        "fleetpipe.contrib.view.run_folder:configure",
    ),
    Command(
        "watch",
        "show a job that runs: what each rank does, which is slow, when it ends",
        "fleetpipe.contrib.view.watch_command:configure",
    ),
    Command(
        "why",
        "say from a trace why steps were slow: which rank, stage, link or micro-batch",
        "fleetpipe.contrib.view.why_command:configure",
    ),
)


def commands(words: Sequence[str] = ()) -> tuple[Command, ...]:
    """Returns all commands: those of the table, then those of other packages.

    Such a package has an entry point of the group ``fleetpipe.commands`` that names a module with
    the functions ``configure`` and ``run`` of a :class:`Command`.

    Args:
        words: The user's arguments; if they begin with a command of the table, only that is
            searched.
    """
    names = [command.name for command in COMMANDS]
    if words and words[0] in names:
        return COMMANDS
    from importlib.metadata import entry_points  # takes as long as all other imports here

    modules = {point.name: point.value for point in entry_points(group="fleetpipe.commands")}
    return COMMANDS + tuple(
        Command(name, f"of {module}", f"{module}:configure", f"{module}:run")
        for name, module in modules.items()
        if name not in names
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that the arguments name; returns the exit code.

    Args:
        argv: Arguments without the program's name; None means those of the process.

    Returns:
        0 done; 1 the schedule is invalid or parity fails; 2 usage, a refused request, or output
        that could not be written; 130 after Ctrl-C.
    """
    streams.prepare()
    write_error: OSError | None = None
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["help"]:  # fleetpipe help COMMAND
        words = [*words[1:2], "--help"]
    try:
        parser = _build_parser(words)
        if not words:
            parser.print_help(sys.stderr)
            return 2
        arguments = parser.parse_args(words)
        # The command may import Paddle, whose logs are to be quiet from the begin.
        with quiet(getattr(arguments, "log_level", DEFAULT_LEVEL)):
            run: Callable[[argparse.Namespace], int] = _import_function(arguments.run)
            code = run(arguments)
        write_error = streams.flush()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 2
        write_error = streams.flush()
    except FleetPipeError as error:
        print(f"fleetpipe: {printable(str(error))}", file=sys.stderr)
        code = 1 if isinstance(error, ScheduleError) else 2
    except KeyboardInterrupt:
        print("fleetpipe: interrupted", file=sys.stderr)
        code = 130
    except OSError:
        # If stdout takes a line, the error is that of another file or connection.
        write_error = streams.flush("\n")
        if write_error is None:
            raise
        code = 0
    if write_error is None:
        return code
    print(f"fleetpipe: the output could not be written: {write_error.strerror}", file=sys.stderr)
    return code or 2


class _PrintCompletion(argparse.Action):
    """The action of ``--print-completion``: prints a shell completion for all commands, exits."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        with needed_for("a completion is printed"):
            import shtab
        print(shtab.complete(parser, shell=values))
        parser.exit()


def _build_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Returns the parser of the command line.

    Only the command that ``words`` name has its arguments, since their definition takes time.
    """
    parser = argparse.ArgumentParser(
        prog="fleetpipe", description="Pipeline parallelism for PaddlePaddle."
    )
    parser.add_argument("--version", action="version", version=f"fleetpipe {__version__}")
    parser.add_argument(
        "--print-completion",
        action=_PrintCompletion,
        choices=("bash", "zsh", "tcsh"),
        help="print what completes commands and options in this shell (needs shtab)",
    )
    parsers = parser.add_subparsers(metavar="COMMAND", required=True)
    table = commands(words)
    for command in table:
        sub = parsers.add_parser(command.name, help=command.help, description=command.help)
        if command.name in words[:1] or "--print-completion" in words[:1]:
            _import_function(command.configure)(sub)
            sub.set_defaults(run=command.run or command.configure.replace("configure", "run"))
            _refuse_unknown_options(sub, words[1:])
    _refuse_unknown_options(parser, words[:1])
    names = [command.name for command in table]
    if words and not words[0].startswith("-") and words[0] not in names:
        parser.error(f"there is no command {words[0]!r}: {nearest(words[0], names)}")
    return parser


def _refuse_unknown_options(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Raises an error for an unknown option, which names the nearest known one.

    Options after the path of a script are the script's, and pass.
    """
    actions = {
        name: action for name, action in parser._option_string_actions.items() if name[1] == "-"
    }
    has_script = any(action.nargs == argparse.REMAINDER for action in parser._actions)
    rest = iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        if word == "--" or (has_script and not word.startswith("-")):
            return
        if not word.startswith("--"):
            continue
        # Like argparse, it accepts the beginning of an option.
        action = next(
            (action for option, action in actions.items() if option.startswith(name)), None
        )
        if action is None:
            parser.error(f"there is no option {name}: {nearest(name, actions)}")
        if action.nargs is None and not equals:
            next(rest, None)


def _import_function(path: str) -> Any:
    """Returns the function of a path such as ``"package.module:function"``."""
    module, _, function = path.partition(":")
    return getattr(importlib.import_module(module), function)
