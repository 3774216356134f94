"""Paddle's store against its own server and others, and Paddle's groups made of it."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import paddle
import pytest

from fleetpipe.errors import ConfigError, PeerFailed, PipelineTimeout, TransportError
from fleetpipe.job import paddle_groups
from fleetpipe.job.meeting import JobStore
from fleetpipe.paddle_api.distributed import open_tcp_store
from tests.fixtures import Patch
from tests.job.test_job import MemoryStore
from tests.transport.helpers import free_port


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
from tests.fixtures import Patch
ctypes.pythonapi.Py_IncRef(ctypes.py_object(open_tcp_store("127.0.0.1", {port}, True, 5)))
print("serving", flush=True)
sys.stdin.readline()
sys.exit(2)
"""


def test_clients_that_leave_during_the_servers_exit_do_not_abort_it() -> None:
    port = free_port()
    script = SERVES_TO_THE_END.format(port=port)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        assert "serving" in server.stdout.readline()
        closing, resetting = (socket.create_connection(("127.0.0.1", port), 5) for _ in range(2))
        server.stdin.close()
        # Seconds from here to where Paddle's libraries are taken down; two more it stays.
        time.sleep(1)
        closing.close()
        resetting.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        resetting.close()
        assert server.wait(timeout=30) == 2


def test_a_store_that_does_not_answer_is_named(
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


class FullStore(MemoryStore):
    """Says of every meeting that all have come."""

    def add(self, key: str, amount: int) -> int:
        value = super().add(key, amount)
        meeting = "/group/" in key or key.endswith(("/groups/1", "/groups/going"))
        return max(value, 2) if meeting else value


class NoWatch:
    """Watches nobody."""

    def __init__(self) -> None:
        self.limits: list[tuple[float, str, tuple[int, ...]]] = []

    @contextmanager
    def limit(self, seconds: float, what: str, ranks: Any) -> Iterator[None]:
        self.limits.append((seconds, what, tuple(ranks)))
        yield

    def gone(self) -> list[int]:
        return []


@pytest.fixture
def made(monkeypatch: Patch) -> Iterator[list[list[int]]]:
    """The members of each group that Paddle made."""
    groups: list[list[int]] = []

    def new_group(ranks: list[int], **_: Any) -> int:
        groups.append(ranks)
        return len(groups)

    monkeypatch.setattr(paddle.distributed, "new_group", new_group)
    monkeypatch.setattr(paddle_groups, "_kept", {})
    monkeypatch.setattr(paddle_groups, "_in_doubt", False)
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    yield groups
    paddle_groups.share_store_again()


def begin(number: int, store: Any, watch: Any, *groups: list[int]) -> list[Any]:
    """Has a job make these groups; returns them."""
    paddle_groups.drop_doubtful_groups(number, store, lambda: None)
    with paddle_groups.creating_groups(number, store, watch, 5.0):
        return [paddle.distributed.new_group(ranks=ranks) for ranks in groups]


def test_a_job_takes_the_groups_of_earlier_ones(
    made: list[list[int]],
) -> None:
    store, watch = FullStore(), NoWatch()
    pair, alone = [0, 1], [1]
    assert begin(0, store, watch, pair, alone, pair) == [1, 2, 3]
    paddle_groups.mark_reusable(True)
    assert begin(1, store, watch, pair, pair, [1, 0], alone) == [1, 3, 4, 2]
    assert made == [pair, alone, pair, [1, 0]]
    what = "making Paddle's group of ranks [0, 1]"
    assert (5.0, what, (0, 1)) in watch.limits


@pytest.mark.parametrize("whose", ["own", "another's"])
def test_groups_that_some_rank_doubts_are_made_anew(whose: str, made: list[list[int]]) -> None:
    store, watch = FullStore(), NoWatch()
    begin(0, store, watch, [0, 1])
    paddle_groups.mark_reusable(whose != "own")
    if whose == "another's":
        store.add("fleetpipe/1/groups/in_doubt", 1)
    assert begin(1, store, watch, [0, 1]) == [2]
    # This job has not ended well either.
    assert begin(2, store, watch, [0, 1]) == [3]


def test_what_gloo_says_is_told_as_what_it_means() -> None:
    text = "[/paddle/third_party/gloo/transport/tcp/pair.cc:784] Connection refused"
    no_nccl = (
        "(PreconditionNotMet) The third-party dynamic library (libnccl.so) that Paddle depends on "
        "is not configured correctly. (error code is libnccl.so: cannot open shared object file)\n"
        "  - Windows: set PATH by `set PATH=XXX; (at /paddle/paddle/phi/dynamic_loader.cc:312)"
    )
    store, watch = FullStore(), NoWatch()
    for raised, kind in (
        (RuntimeError(text), PeerFailed),
        (ValueError(f"\n\n{text}"), PeerFailed),
        (RuntimeError(no_nccl), TransportError),
        (ValueError("a strategy is no number"), ValueError),
        (ConfigError("/paddle/ is no folder"), ConfigError),
    ):
        making: Any = paddle_groups.creating_groups(0, store, watch, 5.0)  # type: ignore[arg-type]
        with pytest.raises(kind) as told, making:
            raise raised
        assert (kind in (PeerFailed, TransportError)) == (told.value is not raised)
        cannot = "cannot load libnccl.so, by which GPUs send: cannot open shared object file"
        assert (cannot in str(told.value)) == (kind is TransportError)
        assert (f"got: {text}" in str(told.value)) == (kind is PeerFailed)
