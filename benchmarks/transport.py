"""Measures what one message costs between two processes of this host: ping-pong, one way.

    python benchmarks/transport.py [--tcp] [--seconds 1.0]

Each figure is half a round trip: of a float32 tensor through the transport (send,
the other process's receive, its send back, receive), and of as many bytes through a bare socket of
the same kind, which is what this machine takes at that moment without any of our work. Beside them
an all_to_all and a reduce_scatter of a tensor of that size, of which half goes each way.
"""

from __future__ import annotations

import argparse
import fcntl
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle

from benchmarks.figures import Figure, parser, report
from fleetpipe.mesh.groups import DirectGroup
from fleetpipe.transport import MessageKey, SocketTransport, Transport, connect, hosts

SIZES = {"4 B": 4, "4 KiB": 4 << 10, "256 KiB": 256 << 10, "4 MiB": 4 << 20, "16 MiB": 16 << 20}
PING, PONG = MessageKey("F", 0, 1, "", 0), MessageKey("B", 0, 1, "", 0)
TIMEOUT = 60.0
#: Of each kind and size.
EXCHANGES = 60


def one_way_times(transport: Transport, nbytes: int, seconds: float) -> list[float]:
    """Returns half of each round trip's seconds, measured at rank 0."""
    tensor = paddle.ones([nbytes // 4], "float32")

    def trip() -> None:
        transport.send(1, PING, tensor)
        transport.receive(1, PONG, TIMEOUT)

    times = _times(trip, seconds)
    transport.send(1, PING, None)
    return times


def bare_times(sock: socket.socket, nbytes: int, seconds: float) -> list[float]:
    """Returns half of each round trip's seconds over a bare socket."""
    buffer = memoryview(bytearray(nbytes))

    def trip() -> None:
        sock.sendall(buffer)
        _fill(sock, buffer)

    times = _times(trip, seconds)
    sock.sendall(b"\1" * nbytes)
    return times


def exchange_times(transport: Transport, nbytes: int) -> dict[str, list[float]]:
    """Returns the seconds of what two ranks exchange, by name. Both call it."""
    group = DirectGroup(transport, TIMEOUT, "benchmark")
    parts = [paddle.ones([max(nbytes // 8, 1)], "float32") for _ in range(2)]
    exchanges = {"all_to_all": group.all_to_all, "reduce_scatter": group.reduce_scatter}
    return {
        name: [_seconds(one, parts) for _ in range(EXCHANGES)][EXCHANGES // 10 :]
        for name, one in exchanges.items()
    }


def _seconds(exchange: Callable[[Any], object], parts: Any) -> float:
    start = time.perf_counter()
    exchange(parts)
    return time.perf_counter() - start


def echo(transport: Transport, sock: socket.socket) -> None:
    """Sends back what comes until there is nothing more, for each of the sizes."""
    for nbytes in SIZES.values():
        while (value := transport.receive(0, PING, TIMEOUT)) is not None:
            transport.send(0, PONG, value)
        buffer = memoryview(bytearray(nbytes))
        while _fill(sock, buffer) and not buffer[0]:
            sock.sendall(buffer)
        exchange_times(transport, nbytes)


def measure(transport: Transport, sock: socket.socket, seconds: float) -> list[Figure]:
    """Returns the figures of each size."""
    figures = []
    for name, nbytes in SIZES.items():
        times = {
            "one way": one_way_times(transport, nbytes, seconds),
            "bare socket": bare_times(sock, nbytes, seconds),
            **exchange_times(transport, nbytes),
        }
        figures += [
            Figure(f"{name}: {what}", [1e6 * one for one in values], "us")
            for what, values in times.items()
        ]
    return figures


def bare_pair(tcp: bool) -> tuple[socket.socket, socket.socket]:
    """Returns two connected sockets with the options of the transport's."""
    if not tcp:
        pair = socket.socketpair()
    else:
        with hosts.listen_tcp("127.0.0.1").sock as listener:
            other = hosts.dial("tcp {} {}".format(*listener.getsockname()))
            pair = listener.accept()[0], other
    for sock in pair:
        hosts.set_socket_options(sock)
        sock.setblocking(True)
    return pair


def _times(trip: Callable[[], None], seconds: float) -> list[float]:
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 20 or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        trip()
        times.append((time.perf_counter() - start) / 2)
    return times[len(times) // 10 :]


def _fill(sock: socket.socket, buffer: memoryview) -> bool:
    filled = 0
    while filled < len(buffer):
        filled += sock.recv_into(buffer[filled:])
    return True


def main() -> None:
    """Runs rank 0 here and rank 1 in a process of its own."""
    options = parser(__doc__)
    options.add_argument("--tcp", action="store_true", help="TCP over loopback, not unix-domain")
    options.add_argument("--seconds", type=float, default=1.0, help="for each size")
    options.add_argument("--echo", nargs=2, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    paddle.set_device("cpu")
    if arguments.echo:
        folder, fd = arguments.echo
        echo(_connect(1, Path(folder), arguments.tcp), socket.socket(fileno=int(fd)))
        return
    mine, theirs = bare_pair(arguments.tcp)
    with tempfile.TemporaryDirectory() as folder:
        fd = theirs.fileno()
        command = [sys.executable, __file__, "--echo", folder, str(fd)]
        command += ["--tcp"] * arguments.tcp
        with subprocess.Popen(command, pass_fds=[fd]) as other:
            transport = _connect(0, Path(folder), arguments.tcp)
            figures = measure(transport, mine, arguments.seconds)
            other.wait(TIMEOUT)
    report(figures, arguments.json)


class _FolderStore:
    """The store through which the two processes find each other: a file for each key."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def set(self, key: str, value: str) -> None:
        self._path(key).write_text(value, encoding="utf-8")

    def get(self, key: str) -> bytes:
        return self._path(key).read_bytes()

    def add(self, key: str, amount: int) -> int:
        with open(self._path(key), "a+", encoding="ascii") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            total = int(file.read() or 0) + amount
            file.truncate(0)
            file.write(str(total))
        return total

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "_")


def _connect(rank: int, folder: Path, tcp: bool) -> SocketTransport:
    return connect(
        rank=rank,
        ranks=2,
        store=_FolderStore(folder),
        namespace="benchmark",
        timeout=TIMEOUT,
        force_tcp=tcp,
    )


if __name__ == "__main__":
    main()
