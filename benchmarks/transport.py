"""Measures what one message costs between two processes of this host: ping-pong, one way.

    python benchmarks/transport.py [--tcp] [--json] [--seconds 1.0]

Each figure is the median of half a round trip: of a float32 tensor through the transport (send,
the other process's receive, its send back, receive), and of as many bytes through a bare socket of
the same kind, which is what this machine takes at that moment without any of our work. Beside them
the median of an all_to_all and of a reduce_scatter of a tensor of that size, of which half goes
each way.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import paddle

from fleetpipe.mesh.groups import DirectGroup
from fleetpipe.transport import MessageKey, Transport, connect
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


def exchange_times(transport: Transport, nbytes: int) -> dict[str, float]:
    """Returns the median microseconds of what two ranks exchange, by name. Both call it."""
    group = DirectGroup(transport, TIMEOUT, "benchmark")
    parts = [paddle.ones([max(nbytes // 8, 1)], "float32") for _ in range(2)]
    medians = {}
    for name, exchange in (("all_to_all", group.all_to_all), ("scatter", group.reduce_scatter)):
        times = []
        for _ in range(EXCHANGES):
            start = time.perf_counter()
            exchange(parts)
            times.append(time.perf_counter() - start)
        medians[name] = round(statistics.median(times[EXCHANGES // 10 :]) * 1e6, 1)
    return medians


def echo(transport: Transport, sock: socket.socket) -> None:
    """Sends back what comes until there is nothing more, for each of the sizes."""
    for nbytes in SIZES.values():
        while (value := transport.receive(0, PING, TIMEOUT)) is not None:
            transport.send(0, PONG, value)
        buffer = memoryview(bytearray(nbytes))
        while _fill(sock, buffer) and not buffer[0]:
            sock.sendall(buffer)
        exchange_times(transport, nbytes)


def measure(transport: Transport, sock: socket.socket, seconds: float) -> list[dict[str, object]]:
    """Returns a row for each size: name, bytes, microseconds one way, GB/s, bare microseconds."""
    rows: list[dict[str, object]] = []
    for name, nbytes in SIZES.items():
        median = statistics.median(one_way_times(transport, nbytes, seconds))
        bare = statistics.median(bare_times(sock, nbytes, seconds))
        rows.append(
            {
                "message": name,
                "bytes": nbytes,
                "one_way_us": round(median * 1e6, 1),
                "GB_per_s": round(nbytes / median / 1e9, 2),
                "bare_us": round(bare * 1e6, 1),
                **{f"{n}_us": us for n, us in exchange_times(transport, nbytes).items()},
            }
        )
    return rows


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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tcp", action="store_true", help="TCP over loopback, not unix-domain")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each size")
    parser.add_argument("--echo", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    paddle.set_device("cpu")
    if arguments.echo:
        folder, fd = arguments.echo
        transport = _connect(1, Path(folder), arguments.tcp)
        echo(transport, socket.socket(fileno=int(fd)))
        transport.close()
        return
    mine, theirs = bare_pair(arguments.tcp)
    with tempfile.TemporaryDirectory() as folder:
        fd = theirs.fileno()
        command = [sys.executable, __file__, "--echo", folder, str(fd), *["--tcp"] * arguments.tcp]
        with subprocess.Popen(command, pass_fds=[fd]) as other:
            transport = _connect(0, Path(folder), arguments.tcp)
            rows = measure(transport, mine, arguments.seconds)
            other.wait(TIMEOUT)
            transport.close()
    kind = "tcp" if arguments.tcp else "unix"
    if arguments.json:
        result = {"transport": kind, "paddle": paddle.__version__, "rows": rows}
        print(json.dumps({**result, "cpus": os.cpu_count()}))
        return
    print(f"{kind}, paddlepaddle {paddle.__version__}, {os.cpu_count()} CPUs")
    for row in rows:
        print(
            f"{row['message']:>8} {row['one_way_us']:>10} us {row['GB_per_s']:>8} GB/s"
            f"   bare socket {row['bare_us']:>10} us"
            f"   all_to_all {row['all_to_all_us']:>10} us"
            f"   reduce_scatter {row['scatter_us']:>10} us"
        )


def _connect(rank: int, folder: Path, tcp: bool) -> Transport:
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
