"""Runs Paddle's launcher once for each attempt, in a fork of a process that has loaded it.

It is started by its path, with the descriptor of a socket to the supervisor. The supervisor orders
one attempt after another: a line of JSON with arguments and environment, which is answered by a
line with the exit code. The line ``pods.STOP`` ends the running attempt. When the supervisor is
gone, the attempt ends, and then this process.

The second argument is a file for the output of this process until it can serve; it is then removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

_LOADING = Path(sys.argv[2])
_ERRORS = os.dup(2)
os.dup2(os.open(_LOADING, os.O_WRONLY | os.O_CREAT), 2)

# Python puts the folder of a file that is run by its path first on sys.path.
sys.path[0] = str(Path(__file__).resolve().parents[3])

from fleetpipe.systems import STOP_SIGNALS  # noqa: E402

# A scheduler may send these to all processes; only the supervisor acts on them. They wait until
# Paddle is loaded, whose handlers would print its stack.
signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # type: ignore[attr-defined,unused-ignore]

from fleetpipe.launch import forked_ranks, streams  # noqa: E402
from fleetpipe.launch.noted_launch import launch  # noqa: E402
from fleetpipe.launch.script import shell_exit_code  # noqa: E402
from fleetpipe.launch.supervisor import pods  # noqa: E402


def _serve_supervisor() -> None:
    """Runs the attempts that the supervisor orders, until its end of the socket closes."""
    supervisor = socket.socket(fileno=int(sys.argv[1]))
    received = b""
    with contextlib.suppress(ConnectionError):  # the supervisor was killed
        while more := supervisor.recv(1 << 16):
            *lines, received = (received + more).split(b"\n")
            orders = [line for line in lines if line + b"\n" != pods.STOP]
            for line in orders:
                # An attempt that was stopped before it began is not started.
                stopped = lines[-1] + b"\n" == pods.STOP
                code = 1 if stopped else _run_attempt(pods.Order(**json.loads(line)), supervisor)
                supervisor.sendall(json.dumps({"code": code}).encode() + b"\n")


def _run_attempt(order: pods.Order, supervisor: socket.socket) -> int:
    """Runs one attempt in a fork; returns the exit code of Paddle's launcher."""
    read_end, write_end = os.pipe()
    process = os.fork()  # type: ignore[attr-defined,unused-ignore]
    if process == 0:
        os.close(read_end)
        supervisor.close()
        _run_launcher(order)
    os.close(write_end)
    # The write end closes when the fork ends; the fork's children have no copy of it.
    ended, _, _ = select.select([read_end, supervisor.fileno()], [], [])
    if read_end not in ended:
        os.kill(process, signal.SIGABRT)  # SIGTERM would be passed on to the ranks
    os.close(read_end)
    _, status = os.waitpid(process, 0)
    return shell_exit_code(os.waitstatus_to_exitcode(status))


def _run_launcher(order: pods.Order) -> NoReturn:
    """Runs Paddle's launcher in this process, which then ends with the launcher's exit code.

    Raises:
        ForkedRank: In a fork of this process, which becomes a rank.
    """
    code = 1
    try:
        # Or names and ports would be those of the last attempt.
        random.seed()
        sys.argv = ["fleetpipe launch", *order.arguments]
        os.environ.update(order.environment)
        launch()
        code = 0
    except forked_ranks.ForkedRank:
        raise
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _restore_stderr() -> None:
    """Restores standard error, and prints to it what was printed while Paddle was loaded."""
    sys.stderr.flush()
    os.dup2(_ERRORS, 2)
    os.close(_ERRORS)
    with contextlib.suppress(FileNotFoundError):  # the supervisor was killed
        sys.stderr.write(_LOADING.read_text(encoding="utf-8", errors="replace"))
        sys.stderr.flush()
        _LOADING.unlink()


if __name__ == "__main__":
    streams.prepare()
    forked_ranks.load()
    _restore_stderr()
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)
    # SIGABRT ends an attempt; the default handler prints no C++ stack, as Paddle's would.
    signal.signal(signal.SIGABRT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # type: ignore[attr-defined,unused-ignore]
    forked_ranks.run_launcher(_serve_supervisor)
