"""Processes that begin with Paddle imported: children of a mother that did it once for all.

An import of Paddle takes seconds, a fork milliseconds; and a child is as fresh as a process that
has imported Paddle and no more. It runs a script as the interpreter would: at the top of its
stack, so that exit codes, handlers and tracebacks are the usual ones; in a session of its own; with
other random numbers than its sisters. Only what is read from the environment by an import is the
mother's: OMP_NUM_THREADS, and Paddle's flags.

The mother answers each line of its standard input with a line. The input ends when the process of
the tests does, in whatever way: then the mother kills the children that are left, and ends too.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests import launching

#: What the mother imports: scripts use these, and an import leaves no thread behind.
MODULES = ("sklearn.datasets", "paddle", "fleetpipe.parity", "fleetpipe.static", "tests.pipelines")
#: The mother's own mark; a child's is written over it.
NO_MARK = "0" * 32
POLL_SECONDS = 0.005


class Forked:
    """A child, to be used like a `subprocess.Popen`.

    Args:
        script: What it runs.
        args: The script's arguments.
        mark: By which :mod:`tests.launching` finds the child's processes.
        env: Additions to the mother's environment.
        cwd: The working directory.
        log: File that takes standard output and error.
    """

    def __init__(
        self,
        script: Path,
        args: Sequence[str],
        *,
        mark: str,
        env: Mapping[str, str],
        cwd: Path,
        log: Path,
    ) -> None:
        if _mother().poll() is not None:
            _mother.cache_clear()
        self.returncode: int | None = None
        self._mother = _mother()
        words = [str(script), *args]
        request = {"words": words, "mark": mark, "env": {**env}, "cwd": str(cwd), "log": str(log)}
        self.pid = _ask(self._mother, request)

    def poll(self) -> int | None:
        """The exit code; None while the child runs. Without the mother nobody knows: SIGKILL's."""
        if self.returncode is None:
            gone = self._mother.poll() is not None
            self.returncode = -signal.SIGKILL if gone else _ask(self._mother, {"poll": self.pid})
        return self.returncode

    def wait(self) -> None:
        """Waits for the end."""
        while self.poll() is None:
            time.sleep(POLL_SECONDS)

    def send_signal(self, number: int) -> None:
        """Sends a signal to the child, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


@cache
def _mother() -> subprocess.Popen[str]:
    mother = subprocess.Popen(
        [sys.executable, "-u", "-m", "tests.forking"],
        cwd=launching.ROOT,
        env=launching._environment(NO_MARK, {}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    atexit.register(_end, mother)
    return mother


def _end(mother: subprocess.Popen[str]) -> None:
    with contextlib.suppress(BrokenPipeError):
        mother.communicate()


def _ask(mother: subprocess.Popen[str], request: Any) -> Any:
    """Returns the answer; where that fails, or is interrupted, the mother ends: none comes late."""
    assert mother.stdin is not None
    assert mother.stdout is not None
    try:
        mother.stdin.write(f"{json.dumps(request)}\n")
        mother.stdin.flush()
        if not (answer := mother.stdout.readline()):
            raise RuntimeError("the process that forks has ended; its last words stand above")
        return json.loads(answer)
    except BaseException:
        mother.kill()
        mother.wait()
        raise


def _serve() -> Any:
    """The mother's life. Returns in each child, with the request that it is to fulfil."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports say is no answer
    faulthandler.register(launching.STACKS_SIGNAL, all_threads=True)
    for module in MODULES:
        if module == "paddle":
            # A child that ends looks through all objects, and copies these for it. Paddle's own are
            # to be taken down: a server of one of its stores that is left running aborts the exit.
            gc.freeze()
        importlib.import_module(module)
    mark = _address(launching.MARK)
    children: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            answer = _exit_code(request["poll"], children)
        else:
            # Born with its mark, a child is found from its first moment on.
            ctypes.memmove(mark, request["mark"].encode(), len(NO_MARK))
            _let_threads_fall_asleep()
            answer = os.fork()
            if answer == 0:
                answers.close()
                return request
            ctypes.memmove(mark, NO_MARK.encode(), len(NO_MARK))
            children.add(answer)
        answers.write(f"{json.dumps(answer)}\n")
        answers.flush()
    for pid in children:
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
    sys.exit()


def _let_threads_fall_asleep(limit: float = 5.0) -> None:
    """Waits until no other thread of this process runs: what one holds stays locked in a child.

    2.6.2 brings a thread that takes its samples once a second under locks which an exit takes too.
    """
    deadline = time.monotonic() + limit
    while any(state != "S" for state in _states()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _states() -> list[str]:
    """The states of this process's other threads, as /proc has them."""
    own = threading.get_native_id()
    states = []
    for task in Path("/proc/self/task").iterdir():
        # A thread may end between the listing and the reading.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if int(task.name) != own:
                states.append(task.joinpath("stat").read_text().rpartition(")")[2].split()[0])
    return states


def _address(variable: str) -> int:
    """Where the value of a variable stands that this process was started with, as /proc shows."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    return int(getenv(variable.encode()))


def _exit_code(pid: int, children: set[int]) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        return None
    children.discard(pid)
    return os.waitstatus_to_exitcode(status)


def _become(request: Any) -> None:
    """Makes this child the process that was asked for, up to its first line of code."""
    import numpy as np
    import paddle

    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(log)
    os.environ.update({**request["env"], launching.MARK: request["mark"]})
    os.chdir(request["cwd"])
    sys.argv[:] = request["words"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    np.random.seed()
    paddle.seed(int.from_bytes(os.urandom(4), "little"))


if __name__ == "__main__":
    _become(_serve())
    runpy.run_path(sys.argv[0], run_name="__main__")
