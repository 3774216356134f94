"""Starts ranks as forks of their launcher's process, so that a job imports Paddle only once.

Start with :func:`popen` and :func:`run_launcher`. A fork first leaves the launcher's calls by an
exception, :class:`ForkedRank`, and then runs the rank's program: so the program ends like any
program of Python, with its threads, exit handlers and open files.

Ranks are forked only on Linux and on a CPU: a fork does not have the threads and the GPU context of
its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from fleetpipe import systems
from fleetpipe.launch.script import LAUNCHED, START

#: Prefixes of the environment variables that Paddle reads when it is loaded.
EARLY = ("FLAGS_", "OMP_", "MKL_", "KMP_", "CUDA_", "OPENBLAS_")
#: The modules that a rank imports before its script begins.
_NEEDED = ("fleetpipe.fleet", "fleetpipe.launch.script", "fleetpipe.launch.substitution")
#: The most threads of a launcher that can fork: the main thread, and that of end_with_command.
_THREADS = 2
#: Seconds between two looks at whether a process has ended.
_WAIT_SECONDS = 0.02
#: The signals that a launcher, Paddle's or ours, has handlers for.
_HANDLED = {*systems.STOP_SIGNALS, signal.SIGINT, signal.SIGABRT}
#: The C library, on Linux.
_LIBC: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
#: At least the bytes of C's ``struct sigaction``.
_ACTION_BYTES = 256
#: By signal, the handler of Paddle's C++, which prints its stack; Python's ``signal`` knows none.
_paddles_actions: dict[int, Any] = {}


class WatchedProcess(ABC):
    """A process with those methods of ``subprocess.Popen`` that Paddle's launcher calls."""

    @abstractmethod
    def poll(self) -> int | None:
        """Returns the exit code, -n if signal n ended the process; None while it runs."""

    @abstractmethod
    def send_signal(self, number: int) -> None:
        """Sends signal ``number``, unless the process has ended."""

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end of the process; returns the exit code.

        Raises:
            subprocess.TimeoutExpired: The process has not ended within ``timeout`` seconds.
        """
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
            time.sleep(_WAIT_SECONDS)
        return code

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(systems.SIGKILL)


class ForkedProcess(WatchedProcess):
    """The handle of a fork of this process."""

    def __init__(self, pid: int) -> None:
        """Stores the number of the process."""
        self.pid = pid
        self._code: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Returns the exit code, -n if signal n ended the process; None while it runs.

        It also returns None while another thread, or this one before a signal, is in this method.
        """
        # A signal handler that passes the signal on may interrupt this method, and call it.
        if self._code is None and self._lock.acquire(blocking=False):
            try:
                if self._code is None:
                    no_wait = os.WNOHANG  # type: ignore[attr-defined,unused-ignore]
                    ended, status = os.waitpid(self.pid, no_wait)
                    self._code = os.waitstatus_to_exitcode(status) if ended else None
            finally:
                self._lock.release()
        return self._code

    def send_signal(self, number: int) -> None:
        """Sends signal ``number``, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, number)


@dataclass(frozen=True)
class Program:
    """The program that a fork runs as a rank.

    Attributes:
        words: The command line: Python, perhaps ``-u``, a file, and arguments.
        environment: All variables of its environment.
        output: The file for its standard output, or its path; None or empty for the launcher's.
        errors: The file for its standard error, or its path; None or empty for the launcher's.
        prepare: Called when the process has left the launcher, before the first signal reaches it.
    """

    words: Sequence[str]
    environment: Mapping[str, str]
    output: IO[Any] | str | None = None
    errors: IO[Any] | str | None = None
    prepare: Callable[[], None] = lambda: None

    def run(self) -> None:
        """Drops what this fork inherited of the launcher; runs the program as ``__main__``."""
        self._open_streams()
        os.environ.clear()
        os.environ.update(self.environment)
        words = self.words[2:] if self.words[1] == "-u" else self.words[1:]
        sys.argv, sys.orig_argv = list(words), list(self.words)
        # Other seeds in each fork, as in new processes.
        random.seed()
        importlib.import_module("numpy").random.seed()
        importlib.import_module("fleetpipe.paddle_api.random").seed_from_system()
        signal.set_wakeup_fd(-1)
        for number in _HANDLED - {signal.SIGINT}:
            signal.signal(number, signal.SIG_DFL)
        for handled, handler in _paddles_actions.items():
            _LIBC.sigaction(handled, handler, None)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.prepare()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)  # type: ignore[attr-defined,unused-ignore]
        runpy.run_path(sys.argv[0], run_name="__main__")

    def _open_streams(self) -> None:
        """Opens the standard streams, and drops the launcher's other open files."""
        for number, file in ((1, self.output), (2, self.errors)):
            if isinstance(file, str) and file:
                os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
            elif file:
                os.dup2(file.fileno(), number)
        # The launcher's sockets, pipes and locks must end with it. They are replaced, not closed:
        # new files would get their numbers, and the launcher's objects would close these.
        null = os.open(os.devnull, os.O_RDWR)
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2 and number != null:
                with contextlib.suppress(OSError):  # the listing itself, which is closed again
                    os.fstat(number)
                    os.dup2(null, number, inheritable=False)


class ForkedRank(BaseException):
    """Raised in a fork to leave the launcher's calls; :func:`run_launcher` catches it."""

    def __init__(self, program: Program) -> None:
        """Stores the program that the fork will run."""
        super().__init__("a fork of the launcher becomes a rank")
        self.program = program


def run_launcher(launch: Callable[[], None]) -> None:
    """Calls ``launch``, a launcher; in a fork that this starts, runs the program of its rank."""
    program = None
    try:
        launch()
    except ForkedRank as rank:
        program = rank.program
    # Outside of the handler, or tracebacks of the program would begin with ForkedRank.
    if program is not None:
        program.run()


def load() -> None:
    """Imports the modules that all ranks need, if ranks can be forks of this process.

    The first call must precede the signal handlers of the launcher.
    """
    if os.environ.get(START) != "spawn" and sys.platform == "linux":
        for name in _NEEDED:
            importlib.import_module(name)
        # Stored for the ranks: until the launcher has handlers, a signal ends it without a stack.
        for number in () if _paddles_actions else _HANDLED - {signal.SIGINT}:
            _paddles_actions[number] = ctypes.create_string_buffer(_ACTION_BYTES)
            _LIBC.sigaction(number, None, _paddles_actions[number])
            signal.signal(number, signal.SIG_DFL)


def popen(
    words: Sequence[str], env: Mapping[str, str], stdout: IO[Any], stderr: IO[Any], **options: Any
) -> Any:
    """Starts a rank as a fork if that is possible, else as a new process.

    The arguments are those of ``subprocess.Popen``, as Paddle's launcher passes them.
    """
    if not _can_fork(words, env):
        return subprocess.Popen(words, env=env, stdout=stdout, stderr=stderr, **options)
    return fork(Program(words, env, stdout, stderr))


def _can_fork(words: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Returns whether a rank may be a fork of this process: same Python, modules and settings."""
    if not set(_NEEDED) <= sys.modules.keys() or threading.active_count() > _THREADS:
        return False
    device = importlib.import_module("fleetpipe.paddle_api.device")
    early_names = {name for name in {*os.environ, *environment} if name.startswith(EARLY)}
    return (
        device.device_kind() == "cpu"
        and words[0] == sys.executable
        and str(LAUNCHED) in words
        and all(os.environ.get(name) == environment.get(name) for name in early_names)
    )


def fork(program: Program) -> ForkedProcess:
    """Starts a program in a fork of this process, with a session of its own; returns its handle.

    Raises:
        ForkedRank: In the fork.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    _LIBC.fflush(None)  # or each rank would print the buffered output of C++ again
    gc.freeze()  # or a garbage collection in a fork would copy the memory of these objects
    # Signals wait until the fork has left the launcher.
    signal_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)  # type: ignore[attr-defined,unused-ignore]
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of a fork beside threads; those here hold no lock that the rank needs.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()  # type: ignore[attr-defined,unused-ignore]
    if child == 0:
        os.setsid()  # type: ignore[attr-defined,unused-ignore]
        raise ForkedRank(program)
    os.close(write_end)
    os.read(read_end, 1)  # waits until the fork has a session, by which it can be ended
    os.close(read_end)
    signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)  # type: ignore[attr-defined,unused-ignore]
    return ForkedProcess(child)
