"""The client of Paddle's store, against Paddle's own server and against others."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest

from fleetpipe.errors import PeerFailed, PipelineTimeout, TransportError
from fleetpipe.job.meeting import JobStore
from fleetpipe.paddle_api.distributed import open_tcp_store


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock


def test_paddles_server_and_its_own_client_understand_it() -> None:
    port = free_port()
    theirs = open_tcp_store("127.0.0.1", port, True, 5)
    ours = JobStore("127.0.0.1", port, 5)
    assert [ours.add("count", 2), theirs.add("count", 3), ours.add("count", 0)] == [2, 5, 5]
    ours.set("name", "väl")
    assert ours.get("name") == theirs.get("name") == "väl".encode()
    theirs.set("long", "x" * 300_000)
    theirs.add("count", 0)  # nothing answers a set: what its sender asks next does
    assert ours.get("long") == b"x" * 300_000
    for client in (ours, theirs):
        moments = [time.monotonic()]
        for _ in range(100):
            client.add("count", 1)
            moments.append(time.monotonic())
        # A client whose parts are not sent at once takes 40 ms for each.
        assert min(end - begin for begin, end in pairwise(moments)) < 0.03
    ours.close()


#: Ends with 2, but stays for as many seconds after Paddle's libraries were taken down.
SERVES_TO_THE_END = """
import ctypes, sys
libc = ctypes.CDLL(None)
libc.on_exit(libc.sleep, None)
from fleetpipe.paddle_api.distributed import open_tcp_store
ctypes.pythonapi.Py_IncRef(ctypes.py_object(open_tcp_store("127.0.0.1", {port}, True, 5)))
print("serving", flush=True)
sys.stdin.readline()
sys.exit(2)
"""


@pytest.mark.parametrize("linger", [b"", struct.pack("ii", 1, 0)], ids=["close", "reset"])
def test_a_client_that_leaves_during_the_servers_exit_does_not_abort_it(linger: bytes) -> None:
    port = free_port()
    script = SERVES_TO_THE_END.format(port=port)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        assert "serving" in server.stdout.readline()
        client = socket.create_connection(("127.0.0.1", port), timeout=5)
        server.stdin.close()
        # Seconds from here to where Paddle's libraries are taken down; two more it stays.
        time.sleep(1)
        if linger:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        client.close()
        assert server.wait(timeout=30) == 2


def test_one_that_does_not_answer_is_not_waited_for_longer_than_the_limit(
    listener: socket.socket,
) -> None:
    store = JobStore("127.0.0.1", listener.getsockname()[1], 0.3)
    with pytest.raises(PipelineTimeout, match=r"did not answer for 0\.3 s"):
        store.add("count", 1)


def test_one_that_closes_is_gone(listener: socket.socket) -> None:
    store = JobStore("127.0.0.1", listener.getsockname()[1], 5)
    listener.accept()[0].close()
    with pytest.raises(PeerFailed, match="rank 0, which serves the job's store, is gone"):
        store.add("count", 1)


def test_a_known_failure_ends_a_wait_and_stands_for_the_break(listener: socket.socket) -> None:
    def failed() -> None:
        raise PeerFailed("rank 2 died")

    store = JobStore("127.0.0.1", listener.getsockname()[1], 60)
    store.check = failed
    with pytest.raises(PeerFailed, match="rank 2 died"):
        store.get("anything")


def test_a_value_of_an_absurd_size_is_refused(listener: socket.socket) -> None:
    store = JobStore("127.0.0.1", listener.getsockname()[1], 5)
    server, _ = listener.accept()
    with server:
        server.sendall(struct.pack("<q", 1 << 62))
        with pytest.raises(TransportError, match="a value of an absurd size"):
            store.get("key")
    store.close()
