"""Starts ranks as forks of their launcher, which has loaded Paddle: a job costs one import of it.

A fork first leaves the calls of the launcher, by an exception, and then runs the rank's program: so
that ends as a program of Python's does, with its threads, exit handlers and open files.

Linux on a CPU alone: a fork has no threads, and no card's context, of the process that it is of.
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
from typing import IO, Any, NoReturn

from fleetpipe import systems
from fleetpipe.launch.script import LAUNCHED, START

#: Variables that count when Paddle is loaded, as these begin.
EARLY = ("FLAGS_", "OMP_", "MKL_", "KMP_", "CUDA_", "OPENBLAS_")
#: What a rank loads before its script begins.
_NEEDED = ("fleetpipe.fleet", "fleetpipe.launch.script", "fleetpipe.launch.substitution")
#: The main thread, and the one that ends the launcher with its command.
_THREADS = 2
_WAIT_SECONDS = 0.02
#: The signals that a launcher, Paddle's or ours, has handlers for.
_HANDLED = {*systems.STOP_SIGNALS, signal.SIGINT, signal.SIGABRT}
_LIBC: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
#: No less than the bytes of C's ``struct sigaction``.
_ACTION_BYTES = 256
#: What Paddle's C++ does at signals: it prints its stack. Python does not know of these handlers.
_paddles_actions: dict[int, Any] = {}


class WatchedProcess(ABC):
    """A process as Paddle's launcher, which else has a ``subprocess.Popen``, watches it."""

    @abstractmethod
    def poll(self) -> int | None:
        """Returns the exit code, -n if signal n ended it; None while it runs."""

    @abstractmethod
    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end, and returns the exit code.

        Raises:
            subprocess.TimeoutExpired: It has not ended within ``timeout`` seconds.
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
    """A fork of this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Returns the exit code, -n if signal n ended it; None while it runs, or another looks."""
        # A handler of a signal, which sends that on, may stand in the midst of this very call.
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
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, number)


@dataclass(frozen=True)
class Program:
    """The program of a rank.

    Attributes:
        words: Its command line: Python, perhaps ``-u``, a file, and arguments.
        environment: All variables that it has.
        output: The file, or its path, that gets what it prints; None or empty for the launcher's.
        errors: The same for its standard error.
        prepare: Called when the process has left the launcher, before the first signal reaches it.
    """

    words: Sequence[str]
    environment: Mapping[str, str]
    output: IO[Any] | str | None = None
    errors: IO[Any] | str | None = None
    prepare: Callable[[], None] = lambda: None

    def run(self) -> None:
        """Leaves what this fork has of the launcher, and runs the program as ``__main__``."""
        self._redirect()
        os.environ.clear()
        os.environ.update(self.environment)
        words = self.words[2:] if self.words[1] == "-u" else self.words[1:]
        sys.argv, sys.orig_argv = list(words), list(self.words)
        _seed_anew()
        signal.set_wakeup_fd(-1)
        for number in _HANDLED - {signal.SIGINT}:
            signal.signal(number, signal.SIG_DFL)
        for handled, action in _paddles_actions.items():
            _LIBC.sigaction(handled, action, None)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.prepare()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)  # type: ignore[attr-defined,unused-ignore]
        runpy.run_path(sys.argv[0], run_name="__main__")

    def _redirect(self) -> None:
        for number, file in ((1, self.output), (2, self.errors)):
            if isinstance(file, str) and file:
                os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
            elif file:
                os.dup2(file.fileno(), number)
        # The launcher's sockets, pipes and locks must end with it. Closed, their numbers would be
        # those of other files, which the launcher's objects would close.
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2 and number != nowhere and _is_open(number):
                os.dup2(nowhere, number, inheritable=False)


class ForkedRank(BaseException):
    """Raised in a fork, to leave the launcher's calls; :func:`run_launcher` takes it."""

    def __init__(self, program: Program) -> None:
        super().__init__("a fork of the launcher becomes a rank")
        self.program = program


def run_launcher(launch: Callable[[], None]) -> None:
    """Runs a launcher; in the forks that it starts meanwhile, the programs of their ranks."""
    program = None
    try:
        launch()
    except ForkedRank as rank:
        program = rank.program
    # Not among what handles an error: those of the program would be said to follow that.
    if program is not None:
        program.run()


def load() -> None:
    """Loads what all ranks need, where they are forks of this process.

    The first call precedes the handlers of the launcher.
    """
    if os.environ.get(START) != "spawn" and sys.platform == "linux":
        for name in _NEEDED:
            importlib.import_module(name)
        if not _paddles_actions:
            _take_paddles_actions()


def _take_paddles_actions() -> None:
    """Notes them for the ranks; the launcher ends without a stack until it has its own handlers."""
    for number in _HANDLED - {signal.SIGINT}:
        _paddles_actions[number] = ctypes.create_string_buffer(_ACTION_BYTES)
        _LIBC.sigaction(number, None, _paddles_actions[number])
        signal.signal(number, signal.SIG_DFL)


def popen(
    words: Sequence[str], env: Mapping[str, str], stdout: IO[Any], stderr: IO[Any], **options: Any
) -> Any:
    """Starts a rank as ``subprocess.Popen`` does: as a fork where that is possible."""
    if not _can_fork(words, env):
        return subprocess.Popen(words, env=env, stdout=stdout, stderr=stderr, **options)
    return fork(Program(words, env, stdout, stderr))


def _can_fork(words: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether a fork of this process is as good as a new one for a rank."""
    if not set(_NEEDED) <= sys.modules.keys() or threading.active_count() > _THREADS:
        return False
    device = importlib.import_module("fleetpipe.paddle_api.device")
    names = {name for name in {*os.environ, *environment} if name.startswith(EARLY)}
    return (
        device.device_kind() == "cpu"
        and words[0] == sys.executable
        and str(LAUNCHED) in words
        and all(os.environ.get(name) == environment.get(name) for name in names)
    )


def fork(program: Program) -> ForkedProcess:
    """Starts a program in a fork of this process, with a session of its own.

    Raises:
        ForkedRank: In the fork.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    _LIBC.fflush(None)  # or each rank would print, too, what C++ has not printed yet
    gc.freeze()  # a fork that looks through these objects would copy them
    # A signal that comes before the fork has left the launcher waits.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)  # type: ignore[attr-defined,unused-ignore]
    began, begins = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of a fork beside threads; those here hold no lock that the rank needs.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()  # type: ignore[attr-defined,unused-ignore]
    if child == 0:
        _begin(program)
    os.close(begins)
    os.read(began, 1)  # until it has a session, by which it can be ended
    os.close(began)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)  # type: ignore[attr-defined,unused-ignore]
    return ForkedProcess(child)


def _begin(program: Program) -> NoReturn:
    os.setsid()  # type: ignore[attr-defined,unused-ignore]
    raise ForkedRank(program)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _seed_anew() -> None:
    """Gives the generators the seeds of a process that has just begun, other ones in each."""
    random.seed()
    importlib.import_module("numpy").random.seed()
    importlib.import_module("fleetpipe.paddle_api.random").seed_anew()
