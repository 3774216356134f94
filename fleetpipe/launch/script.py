"""Runs a training script with its arguments, in this process or on every rank of a job.

Start with :func:`execute` and :func:`launch`. A command, such as ``fleetpipe run``, that starts
processes has a folder with a locked file. The system frees the lock when the command ends, even if
it is killed; the processes wait for that, and end too.
"""

from __future__ import annotations

import argparse
import builtins
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from fleetpipe import arguments as kinds
from fleetpipe import systems
from fleetpipe.errors import ConfigError, PeerFailed
from fleetpipe.extras import extra
from fleetpipe.job import attempt_files
from fleetpipe.launch import streams

#: The variable with the folder of the command that started this process.
_COMMAND_FOLDER = "FLEETPIPE_COMMAND_FOLDER"
#: A file system in memory, if the system has one.
_MEMORY = Path("/dev/shm")
#: The begin of the names of such folders, and the name of the locked file in each.
_PREFIX, _LOCK = "fleetpipe-launch-", "lock"

#: The variable for how ranks start: ``spawn``, or by default ``fork`` where that is possible.
START = "FLEETPIPE_START"
#: The program of each rank, and that which runs Paddle's launcher.
LAUNCHED = Path(__file__).with_name("rank_main.py")
_LAUNCHER = Path(__file__).with_name("launcher.py")


@contextmanager
def command_folder(large: bool = False) -> Iterator[Path]:
    """Makes the folder of a command, and removes it when the context ends.

    Only this user can read it. Its path is in the environment, which processes that are started
    meanwhile inherit. Folders of commands that have ended are removed too.

    Args:
        large: Whether its files may be large: it is in ``TMPDIR`` then, else in the host's memory.
    """
    in_memory = not large and os.access(_MEMORY, os.W_OK)
    parent = _MEMORY if in_memory else Path(tempfile.gettempdir())
    for earlier in parent.glob(f"{_PREFIX}*"):
        # It may be another user's, or be removed by another command meanwhile.
        with suppress(OSError), (earlier / _LOCK).open("r+") as lock:
            if systems.lock(lock.fileno(), wait=False):
                shutil.rmtree(earlier, ignore_errors=True)
    hidden = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=parent))
    folder = parent / hidden.name[1:]
    outer = os.environ.get(_COMMAND_FOLDER)
    try:
        with (hidden / _LOCK).open("w") as lock:
            if not systems.lock(lock.fileno()):
                lock.close()  # Windows renames no folder with an open file
            # Other commands see it only now that it is locked.
            hidden.rename(folder)
            os.environ[_COMMAND_FOLDER] = str(folder)
            yield folder
    finally:
        os.environ.pop(_COMMAND_FOLDER, None)
        if outer is not None:
            os.environ[_COMMAND_FOLDER] = outer
        shutil.rmtree(folder, ignore_errors=True)


def end_with_command(first: Callable[[], None] = lambda: None) -> None:
    """Makes this process end with the command that started it, if it was started by one.

    A rank, which has a session of its own, ends with all processes of that session.

    Args:
        first: Called before this process ends, and before the folder is removed; not in a rank.
    """
    if _COMMAND_FOLDER in os.environ:
        folder = Path(os.environ[_COMMAND_FOLDER])
        # With a name, so that the first thread of the script is still called Thread-1.
        waiting = threading.Thread(
            target=_end_after_command, args=[folder, first], name="end with command", daemon=True
        )
        waiting.start()


def _end_after_command(folder: Path, first: Callable[[], None]) -> None:
    """Waits until the command's lock is free, since the command has ended; kills this process."""
    with suppress(FileNotFoundError), (folder / _LOCK).open() as lock:
        if not systems.lock(lock.fileno(), shared=True):
            return
        if "PADDLE_TRAINER_ID" in os.environ:
            systems.end_session(os.getpid())
        else:
            # Before the folder goes: ``first`` may end ranks that hang, which are listed there.
            first()
            shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), systems.SIGKILL)


def configure_run(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``fleetpipe run`` to its parser."""
    extra("view").configure_serve(parser)
    configure_script(parser, "a training script that uses paddle.distributed.fleet")


def configure_parity(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``fleetpipe parity`` to its parser."""
    parser.add_argument(
        "--report", type=kinds.new_file, metavar="FILE", help="write the result as JSON"
    )
    parser.add_argument(
        "--whole",
        action="store_true",
        help="run the whole script in several ways, each in a copy of this folder, and compare "
        "what its calls return and leave: in one process, twice, on the N ranks, on one device, "
        "stopped and started again",
    )
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="CHANGE",
        help="with --whole, one more way: pp=1,dp=2 or schedule=ZBH1 (may be repeated)",
    )
    parser.add_argument(
        "--steps", type=kinds.positive, metavar="N", help="end the script behind N training steps"
    )
    # With these --whole runs the script.
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--stop-after", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--set", help=argparse.SUPPRESS)
    configure_script(parser, "a training script that uses fleetpipe.fleet, or Paddle's")


def configure_profile(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``fleetpipe profile`` to its parser."""
    parser.add_argument(
        "-o",
        "--output",
        type=kinds.new_file,
        default=Path("profile.json"),
        metavar="FILE",
        help="where the profile is written (default: %(default)s)",
    )
    configure_script(parser, "a training script that uses fleetpipe.fleet, or Paddle's")


def configure_script(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds the arguments of a command that runs a script: processes, logs, script.

    Args:
        parser: The parser of the command.
        what: The help text of the script.
    """
    parser.add_argument(
        "--nproc",
        *kinds.spellings("nproc_per_node"),
        dest="nproc",
        type=kinds.processes,
        default=1,
        metavar="N",
        help="processes to launch (default: 1, which plays all ranks)",
    )
    add_script(parser, what, "where each of several processes leaves its log")


def add_script(parser: argparse.ArgumentParser, what: str, logs: str) -> None:
    """Adds the arguments for logs, log level, the script and its arguments.

    Args:
        parser: The parser of a command.
        what: The help text of the script.
        logs: The beginning of the help text of the folder of logs.
    """
    parser.add_argument(
        *kinds.spellings("log-dir"),
        default="log",
        metavar="FOLDER",
        help=f"{logs} (default: %(default)s)",
    )
    parser.add_argument(
        *kinds.spellings("log-level"),
        choices=streams.LEVELS,
        default=streams.DEFAULT_LEVEL,
        help="least level of log lines to show: Paddle's, and fleetpipe's, whose notices stay at "
        "%(default)s, the default",
    )
    parser.add_argument(
        "-m", dest="module", action="store_true", help="SCRIPT is a module's name, as for python -m"
    )
    parser.add_argument("script", action=_ReadScript, metavar="SCRIPT", help=what)
    rest = parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="arguments of the script"
    )
    rest.required = False  # or a missing SCRIPT is reported with these


class _ReadScript(argparse.Action):
    """Parses the path of a script or, after ``-m``, the name of a module."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Stores the parsed script; argparse calls it."""
        try:
            read = kinds.module if namespace.module else kinds.script
            setattr(namespace, self.dest, read(values))
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from None


def script_words(options: argparse.Namespace) -> list[str]:
    """Returns the script and its arguments as the words of a command line."""
    option = ["-m"] if isinstance(options.script, kinds.Module) else []
    return [*option, str(options.script), *options.arguments]


def to_be_launched(options: argparse.Namespace) -> bool:
    """Returns whether this process must start several ranks, and is not a rank itself."""
    return bool(options.nproc > 1 and "PADDLE_TRAINER_ID" not in os.environ)


def require_start() -> None:
    """Checks that ranks can be started.

    Raises:
        ConfigError: ``FLEETPIPE_START`` has an unknown value.
        UsageError: This system cannot run several ranks.
    """
    systems.require_ranks()
    if os.environ.get(START, "") not in ("", "fork", "spawn"):
        raise ConfigError(
            f"{START} chooses how the ranks start",
            expected="spawn or fork",
            got=repr(os.environ[START]),
            fix=f"leave {START} out: ranks are forks of their launcher where that is possible",
        )


def launch(options: argparse.Namespace, *words: str) -> int:
    """Runs a ``fleetpipe`` command on several ranks under Paddle's launcher.

    Args:
        options: The options of the command.
        words: The command that each rank runs, with options, before the script.

    Returns:
        The exit code of the first rank that failed, 128 + n if signal n ended it; else 0.

    Raises:
        ConfigError: The folder of the logs cannot be written to, or ``FLEETPIPE_START`` is wrong.
        UsageError: This system cannot run several ranks.
    """
    require_start()
    kinds.require_folder("--log-dir", options.log_dir)
    remove_logs_beyond(Path(options.log_dir), options.nproc)
    level = options.log_level
    command = [sys.executable, "-u", str(_LAUNCHER), "--nproc_per_node", str(options.nproc)]
    command += ["--log_dir", options.log_dir, "--log_level", level]
    command += [str(LAUNCHED), *words, "--log-level", level, *script_words(options)]
    interrupted = False
    with (
        extra("view.serving").serving(getattr(options, "serve", None)) as board,
        command_folder() as folder,
    ):
        board.begin(folder)
        environment = {**streams.environment(level), attempt_files.FOLDER: str(folder)}
        process = subprocess.Popen(command, env=environment)
        # The launcher passes these on to the ranks.
        for number in systems.STOP_SIGNALS:
            signal.signal(number, lambda number, _: process.send_signal(number))
        # Each rank has a session of its own, which a terminal's Ctrl-C does not reach.
        next_signals = iter((signal.SIGINT, systems.SIGKILL))
        while process.returncode is None:
            try:
                process.wait()
            except KeyboardInterrupt:
                interrupted = True
                signal_ranks(folder, next(next_signals, systems.SIGKILL))
        if process.returncode and not interrupted:
            _show_failure(folder)
        saved = attempt_files.steps_saved_at_stop(folder)
    if interrupted:
        if saved is None:
            sys.stderr.write("fleetpipe: interrupted\n")
        return attempt_files.INTERRUPTED
    return shell_exit_code(process.returncode)


def _show_failure(directory: Path) -> None:
    """Prints the error of the rank that failed first, unless rank 0 has printed the same error.

    Args:
        directory: The folder of the attempt.
    """
    failures = [report.failure for report in attempt_files.failures(directory)]
    printed = {failure.text for failure in failures if failure.rank == 0}
    if failures and failures[0].what == "raised" and failures[0].text not in printed:
        first = failures[0]
        sys.stderr.write(f"fleetpipe: rank {first.rank} raised {first.text}\n{first.details}")


def remove_logs_beyond(folder: Path, ranks: int) -> None:
    """Removes from a folder the logs of ranks ``ranks`` and above, of an earlier, larger job."""
    for log in folder.glob("workerlog.*"):
        number = log.suffix[1:]
        if number.isdecimal() and int(number) >= ranks:
            log.unlink(missing_ok=True)


def signal_ranks(directory: Path, number: int, excluded: Container[int] = ()) -> set[int]:
    """Sends a signal to the processes of an attempt's ranks that have not ended.

    Args:
        directory: The folder of the attempt.
        number: The signal.
        excluded: Ranks that do not get it.

    Returns:
        The ranks that have been started so far.
    """
    ended = {rank for rank, _ in attempt_files.ended_ranks(directory)}
    started = attempt_files.started_ranks(directory)
    for rank, process in started:
        if rank not in ended and rank not in excluded:
            with suppress(ProcessLookupError):
                os.kill(process, number)
    return {rank for rank, _ in started}


def end_sessions(directory: Path) -> None:
    """Kills what the ranks of an attempt have left running; ``directory`` has its files."""
    for _, process in attempt_files.started_ranks(directory):
        systems.end_session(process)


def shell_exit_code(code: int) -> int:
    """Returns a process's exit code as a shell shows it: 128 + n for -n, if signal n ended it."""
    return code if code >= 0 else 128 - code


def execute(script: Path | kinds.Module, arguments: Sequence[str]) -> None:
    """Runs a script in this process as ``__main__``; its exceptions pass through.

    ``sys.argv``, ``sys.path[0]``, ``__file__`` and the module are those of ``python SCRIPT``, or of
    ``python -m MODULE``.

    Args:
        script: The path of the script, or the name of a module.
        arguments: The script's arguments.
    """
    with _as_main(script, arguments) as (module, code):
        exec(code, vars(module))


def execute_to_the_end(script: Path | kinds.Module, arguments: Sequence[str]) -> int:
    """Runs a script as the last action of this process; the arguments are those of :func:`execute`.

    Returns:
        The exit code of ``python SCRIPT``. An uncaught exception is printed as Python prints it,
        from the script's frame on, and sent to the other ranks at the end.
    """
    try:
        execute(script, arguments)
    except SystemExit as stop:
        return exit_code(stop.code)
    except Exception as error:
        # Python itself keeps the error here, and fleetpipe finds it when the process ends.
        sys.last_type, sys.last_value = type(error), error
        # From the script's own frame on: the frames before are fleetpipe's.
        traceback = error.__traceback__
        while traceback and traceback.tb_frame.f_globals["__name__"] != "__main__":
            traceback = traceback.tb_next
        sys.last_traceback = error.__traceback__ = traceback
        if isinstance(error, PeerFailed) and error.brief:
            sys.stderr.write(f"fleetpipe: {error.brief}\n")
        else:
            sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


@contextmanager
def _as_main(
    script: Path | kinds.Module, arguments: Sequence[str]
) -> Iterator[tuple[ModuleType, CodeType]]:
    """Makes a script the main module of this process while the context is open.

    Yields:
        The module and its code.
    """
    before = sys.argv, sys.path[0], sys.modules["__main__"]
    module = ModuleType("__main__")
    vars(module).update(__builtins__=builtins, __annotations__={}, __cached__=None)
    try:
        if isinstance(script, kinds.Module):
            sys.path[0] = os.getcwd()
            spec, code = _module_code(script)
            vars(module).update(__spec__=spec, __package__=spec.parent, __cached__=spec.cached)
            path, loader = str(spec.origin), spec.loader
            sys.argv = [path, *arguments]
        else:
            path = os.path.abspath(script)
            loader = SourceFileLoader("__main__", path)
            sys.argv = [str(script), *arguments]
            sys.path[0] = os.path.dirname(os.path.realpath(script))
            with io.open_code(path) as file:
                # Without dont_inherit the script would get this file's __future__ imports.
                code = compile(file.read(), path, "exec", dont_inherit=True)
        vars(module).update(__file__=path, __loader__=loader)
        sys.modules["__main__"] = module
        yield module, code
    finally:
        sys.argv, sys.path[0], sys.modules["__main__"] = before


def _module_code(name: str) -> tuple[ModuleSpec, CodeType]:
    """Returns spec and code of what ``python -m NAME`` runs: of a package its ``__main__``.

    Raises:
        ModuleNotFoundError: There is no such module.
    """
    spec = find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = find_spec(name)
    code = spec and isinstance(spec.loader, InspectLoader) and spec.loader.get_code(name)
    if not spec or not code:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return spec, code


def exit_code(status: object) -> int:
    """Returns the exit code for ``sys.exit(status)``; prints a text, as Python does."""
    if status is None:
        return 0
    if isinstance(status, int):
        return int(status)  # unittest.main ends with a bool
    sys.stderr.write(f"{status}\n")
    return 1


def run(options: argparse.Namespace) -> int:
    """Runs the script with fleetpipe's modules in place of Paddle's.

    Returns:
        The script's exit code; with several ranks that of the first rank that failed.
    """
    if to_be_launched(options):
        return launch(options, "run")
    # Imported here because it imports Paddle, which a process that starts ranks does not need.
    from fleetpipe.launch.substitution import in_place_of_paddles

    if options.serve is not None:
        os.environ[extra("view").SERVE] = str(options.serve)
    with in_place_of_paddles():
        return execute_to_the_end(options.script, options.arguments)
