"""Measures what one message costs between two processes of this host: ping-pong, one way.

    python benchmarks/transport.py [--tcp] [--seconds 1.0]

Each figure is half a round trip: of a float32 tensor through the transport (send,
the other process's receive, its send back, receive), and of as many bytes through a bare socket of
the same kind, which is what this machine takes at that moment without any of our work; of the
tensor by Paddle's process groups, over Gloo. Beside them an all_to_all and a reduce_scatter of a
tensor of that size, of which half goes each way.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import paddle
from paddle.base import core

from benchmarks.figures import Figure, parser, report
from fleetpipe.job.groups import neighbours
from fleetpipe.mesh.groups import DirectGroup
from fleetpipe.paddle_api.gloo.stores import open_tcp_store
from fleetpipe.paddle_api.topology import Group
from fleetpipe.transport import MessageKey, SocketTransport, Transport, connect
from fleetpipe.transport.joining import hosts
from tests.transport.helpers import FolderStore

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


def echo(transport: Transport, by_group: Transport, sock: socket.socket) -> None:
    """Sends back what comes until there is nothing more, for each of the sizes."""
    for nbytes in SIZES.values():
        while (value := transport.receive(0, PING, TIMEOUT)) is not None:
            transport.send(0, PONG, value)
        buffer = memoryview(bytearray(nbytes))
        while _fill(sock, buffer) and not buffer[0]:
            sock.sendall(buffer)
        exchange_times(transport, nbytes)
        while (value := by_group.receive(0, PING, TIMEOUT)) is not None:
            by_group.send(0, PONG, value)


def measure(
    transport: Transport, by_group: Transport, sock: socket.socket, seconds: float
) -> list[Figure]:
    """Returns the figures of each size."""
    figures = []
    for name, nbytes in SIZES.items():
        times = {
            "one way": one_way_times(transport, nbytes, seconds),
            "bare socket": bare_times(sock, nbytes, seconds),
            **exchange_times(transport, nbytes),
            "process group": one_way_times(by_group, nbytes, seconds),
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
        hosts.enlarge(sock)
        sock.setblocking(True)
    return pair


@contextmanager
def process_group(
    transport: SocketTransport, folder: Path, ports: list[int]
) -> Iterator[Transport]:
    """Makes Paddle's groups of both processes, each in a store of its own, and goes over them."""
    rank, groups, stores = transport.rank, {}, []
    for number, (port, direction) in enumerate(zip(ports, neighbours.directions(2))):
        stores.append(open_tcp_store("127.0.0.1", port, rank == 0, TIMEOUT))
        # Paddle's constructor asks for it.
        os.environ["PADDLE_TRAINER_ID"] = str(rank)
        made = core.ProcessGroupGloo.create(stores[-1], rank, 2, number)
        groups[direction] = Group(rank, number, [0, 1], made)
    store = FolderStore(folder)
    made = neighbours.connect(transport, [0, 1], groups, store, "groups", TIMEOUT)
    yield made
    made.flush(TIMEOUT)
    made.close()


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
    options.add_argument("--echo", nargs=4, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    paddle.set_device("cpu")
    if arguments.echo:
        folder, fd, *numbers = arguments.echo
        transport = _connect(1, Path(folder), arguments.tcp)
        with process_group(transport, Path(folder), [*map(int, numbers)]) as by_group:
            echo(transport, by_group, socket.socket(fileno=int(fd)))
        return
    mine, theirs = bare_pair(arguments.tcp)
    with tempfile.TemporaryDirectory() as folder:
        fd, ports = theirs.fileno(), free_ports(2)
        command = [sys.executable, __file__, "--echo", folder, *map(str, [fd, *ports])]
        command += ["--tcp"] * arguments.tcp
        with subprocess.Popen(command, pass_fds=[fd]) as other:
            transport = _connect(0, Path(folder), arguments.tcp)
            with process_group(transport, Path(folder), ports) as by_group:
                figures = measure(transport, by_group, mine, arguments.seconds)
            other.wait(TIMEOUT)
    report(figures, arguments.json)


def free_ports(count: int) -> list[int]:
    """Returns ports that nobody listens at."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _connect(rank: int, folder: Path, tcp: bool) -> SocketTransport:
    return connect(
        rank=rank,
        ranks=2,
        store=FolderStore(folder),
        namespace="benchmark",
        timeout=TIMEOUT,
        force_tcp=tcp,
    )


if __name__ == "__main__":
    main()
