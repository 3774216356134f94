"""Controls the process in which Paddle's launcher runs, for the supervisor."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fleetpipe import systems
from fleetpipe.errors import UsageError
from fleetpipe.launch.script import shell_exit_code

_SERVER = Path(__file__).with_name("pod_server.py")
#: The line that ends an attempt.
STOP = b"stop\n"
#: The most seconds that the process takes to end after its socket is closed.
_LAST_SECONDS = 10.0


@dataclass(frozen=True)
class Order:
    """The message by which the supervisor has an attempt run.

    Attributes:
        arguments: The arguments of Paddle's launcher.
        environment: Variables to add to the environment.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]


class Pods:
    """A process that has loaded Paddle's launcher, and runs one attempt after another."""

    def __init__(self, environment: Mapping[str, str], folder: Path) -> None:
        """Starts the process.

        Args:
            environment: Its environment.
            folder: A folder for the file with its output until it has loaded Paddle.
        """
        self._environment = dict(environment)
        #: The output of the process; the process removes the file once it has loaded Paddle.
        self._loading = folder / "loading"
        self._start_process()

    def _start_process(self) -> None:
        """Starts the process, connected by a socket."""
        self._socket, server_end = socket.socketpair()
        with server_end:
            arguments = [str(_SERVER), str(server_end.fileno()), str(self._loading)]
            self._process = subprocess.Popen(
                [sys.executable, "-u", *arguments],
                env=self._environment,
                pass_fds=[server_end.fileno()],
                # Signals of the terminal reach only the supervisor, which decides.
                start_new_session=True,
            )

    def fileno(self) -> int:
        """Returns the file descriptor that becomes readable when an attempt ends."""
        return self._socket.fileno()

    def start(self, order: Order) -> None:
        """Starts an attempt; if the process has ended, starts a new one before."""
        if self._process.poll() is not None:
            self._socket.close()
            self._start_process()
        # If the process ends meanwhile, code() returns its exit code.
        with contextlib.suppress(ConnectionError):
            self._socket.sendall(json.dumps(asdict(order)).encode() + b"\n")

    def stop(self) -> None:
        """Ends the running attempt; :meth:`code` then returns.

        A process that still loads Paddle is killed: it has started no launcher, and would read the
        order to stop only after it has loaded.
        """
        if self._loading.exists():
            # Removed first, so that code() does not report an error of loading.
            self._loading.unlink(missing_ok=True)
            systems.end_session(self._process.pid)
        with contextlib.suppress(ConnectionError):
            self._socket.sendall(STOP)

    def code(self) -> int:
        """Waits for the end of the attempt; returns the exit code of Paddle's launcher.

        If the process itself was killed, its session is killed too, and its code is returned.

        Raises:
            UsageError: The process could not load Paddle's launcher.
        """
        answer = b""
        while not answer.endswith(b"\n"):
            more = b""
            # Reset if the process ended before it read the order.
            with contextlib.suppress(ConnectionResetError):
                more = self._socket.recv(1 << 12)
            if not more:
                code = shell_exit_code(self._process.wait())
                systems.end_session(self._process.pid)  # a launcher that it has started
                if self._loading.exists():
                    raise self._loading_error(code)
                return code or 1
            answer += more
        return int(json.loads(answer)["code"])

    def _loading_error(self, code: int) -> UsageError:
        """Returns the error for a process that ended before it had loaded Paddle's launcher."""
        lines = self._loading.read_text(encoding="utf-8", errors="replace").splitlines()
        # The last message, with its indented lines.
        first = max((n for n, line in enumerate(lines) if line and line[0] != " "), default=0)
        return UsageError(
            f"Paddle's launcher cannot be loaded: the process that does ended with {code}",
            got="\n".join(lines[first:]) or "not a word of why",
            fix="pip install paddlepaddle (CPU) or paddlepaddle-gpu (GPU) where that is missing; "
            f"else see what {sys.executable} -c 'import paddle.distributed.launch' says",
        )

    def close(self) -> None:
        """Ends the process, and the running attempt."""
        self._socket.close()
        try:
            self._process.wait(_LAST_SECONDS)
        except subprocess.TimeoutExpired:
            systems.end_session(self._process.pid)
            self._process.wait()
