"""Ranks find each other through the store, whoever is missing and whoever else knocks."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from fleetpipe.errors import PipelineTimeout, TransportError
from fleetpipe.transport import SocketTransport, base, connect, hosts, peer_connections
from fleetpipe.transport.base import Limit, await_keys
from fleetpipe.transport.handshake import connecting_side
from fleetpipe.transport.wire.structure import VERSION
from tests.fixtures import LogCapture, Patch
from tests.transport.helpers import LIMIT, ThreadStore, forward, join_all

pytestmark = pytest.mark.once


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def begin(
    threads: ThreadPoolExecutor, store: ThreadStore, rank: int, ranks: int = 2, **options: Any
) -> Future[SocketTransport]:
    given = {"timeout": LIMIT, "namespace": "test", "store": store, **options}
    return threads.submit(connect, rank=rank, ranks=ranks, **given)


def finish(*joining: Future[SocketTransport]) -> None:
    """Lets ranks 0 and 1 exchange a message and closes all."""
    transports = [future.result() for future in joining]
    transports[0].send(1, forward(0), "hello")
    assert transports[1].receive(0, forward(0), LIMIT) == "hello"
    for transport in transports:
        transport.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def address_of(store: ThreadStore, rank: int = 0) -> str:
    """Returns where a rank listens, once it does."""
    key = f"test/{rank}/addresses"
    wait_until(lambda: key in store.values)
    return str(json.loads(store.values[key])["addresses"].split(",")[0])


def knock(address: str) -> socket.socket:
    sock = hosts.dial(address)
    sock.setblocking(True)
    sock.settimeout(LIMIT)
    return sock


def facts_of(host: str) -> str:
    """Returns what rank 1 of 2 publishes of itself."""
    about = {"tcp": "0", "host": host, "secret": "", "token": ""}
    return json.dumps({"version": VERSION, "ranks": 2, **about})


def waiting_rank(threads: ThreadPoolExecutor, store: ThreadStore) -> Future[SocketTransport]:
    """Begins rank 0 and lets it listen: rank 1's first facts are there, rank 1 is not."""
    future = begin(threads, store, 0)
    store.set("test/1/host", facts_of(hosts.host_identity()))
    store.add("test/1/host/ready", 1)
    return future


def family(transport: SocketTransport, peer: int) -> int:
    with socket.socket(fileno=os.dup(transport._connections[peer].fd)) as sock:
        return sock.family


def test_streams_are_told_apart(threads: ThreadPoolExecutor) -> None:
    store, ranks = ThreadStore(), range(3)

    def join(rank: int) -> list[peer_connections.Joined]:
        return peer_connections.join(
            rank=rank, ranks=3, store=store, namespace="test", timeout=LIMIT, streams=2
        )

    joined = list(threads.map(join, ranks))
    pairs = [(rank, peer) for rank in ranks for peer in ranks if rank != peer]
    for stream in (1, 0):
        for rank, peer in pairs:
            joined[rank][stream].sockets[peer].sendall(b"%d>%d:%d" % (rank, peer, stream))
    for stream in (0, 1):
        for rank, peer in pairs:
            expected = b"%d>%d:%d" % (peer, rank, stream)
            assert joined[rank][stream].sockets[peer].recv(100) == expected
    for rank in ranks:
        for one in joined[rank]:
            assert set(one.sockets) == set(ranks) - {rank}
            for sock in one.sockets.values():
                sock.close()


def test_hosts_decide_between_unix_and_tcp(monkeypatch: Patch) -> None:
    """Ranks 0 and 1 are on one host, rank 2 is on another."""
    threads: dict[int, str] = {}
    monkeypatch.setattr(hosts, "host_identity", lambda: threads[threading.get_ident()])
    store, ranks = ThreadStore(), {}

    def join(rank: int) -> None:
        threads[threading.get_ident()] = "far" if rank == 2 else "near"
        ranks[rank] = connect(
            rank=rank, ranks=3, store=store, namespace="test", timeout=LIMIT, address="127.0.0.1"
        )

    joining = [threading.Thread(target=join, args=(rank,)) for rank in range(3)]
    for thread in joining:
        thread.start()
    for thread in joining:
        thread.join(LIMIT)
    families = {(r, p): family(ranks[r], p) for r in range(3) for p in range(3) if r != p}
    for transport in ranks.values():
        transport.close()
    near = {(0, 1), (1, 0)}
    assert {edge for edge, kind in families.items() if kind == socket.AF_UNIX} == near
    assert {edge for edge, kind in families.items() if kind == socket.AF_INET} == set(
        families
    ) - near


def test_loopback_listeners_close_in_the_end(
    threads: ThreadPoolExecutor, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("FLEETPIPE_FORCE_TCP", "1")
    store = ThreadStore()
    joining = [begin(threads, store, rank) for rank in range(2)]
    assert family(joining[0].result(), 1) == socket.AF_INET
    finish(*joining)
    assert address_of(store).startswith("tcp 127.0.0.1 ")
    with pytest.raises(OSError, match="refused"):
        knock(address_of(store)).recv(1)


def test_tcp_on_some_ranks_of_a_host_alone_is_named_on_all() -> None:
    store = ThreadStore()
    with ThreadPoolExecutor(3) as threads:
        joining = [begin(threads, store, rank, ranks=3, force_tcp=rank == 1) for rank in range(3)]
        for each in joining:
            with pytest.raises(TransportError, match=r"rank 0 and rank 1 of one host") as caught:
                each.result(LIMIT)
            assert "got: 0 on rank 0, 1 on rank 1" in str(caught.value)


def test_ranks_whose_host_has_no_identity_use_tcp(monkeypatch: Patch) -> None:
    monkeypatch.setattr(hosts, "host_identity", lambda: "")
    monkeypatch.setenv("FLEETPIPE_ADDRESS", "127.0.0.1")
    first, second = join_all(2)
    assert family(first, 1) == family(second, 0) == socket.AF_INET
    second.send(0, forward(0), "here")
    assert first.receive(1, forward(0), LIMIT) == "here"
    first.close()
    second.close()


def test_an_address_that_is_missing_is_named() -> None:
    with pytest.raises(TransportError, match="rank 3 does not listen") as caught:
        peer_connections._choose_address(3, ["unix fleetpipe-1"], by_unix_socket=False)
    assert "an address of kind tcp" in str(caught.value)


def test_host_identity_is_the_kernel_and_its_network() -> None:
    identity = hosts.host_identity()
    assert os.readlink("/proc/self/ns/net") in identity
    assert identity == hosts.host_identity()


def test_an_address_of_another_host_or_of_none_is_refused() -> None:
    with pytest.raises(TransportError, match=r"cannot listen on 192\.0\.2\.1"):
        hosts.listen_tcp("192.0.2.1")
    with pytest.raises(TransportError, match=r"cannot be told to connect to 0\.0\.0\.0"):
        hosts.listen_tcp("0.0.0.0")


def test_missing_ranks_are_named() -> None:
    with pytest.raises(PipelineTimeout, match=r"rank 0 waited 0\.3 s for rank\(s\) 1, 2") as raised:
        connect(rank=0, ranks=3, store=ThreadStore(), namespace="test", timeout=0.3)
    assert "connecting the 3 ranks of 'test'" in str(raised.value)


def test_a_rank_that_published_but_never_connected_is_named(threads: ThreadPoolExecutor) -> None:
    store = ThreadStore()
    store.set("test/1/host", facts_of("elsewhere"))
    store.add("test/1/host/ready", 1)
    with pytest.raises(PipelineTimeout, match=r"for rank\(s\) 1 to connect"):
        begin(threads, store, 0, timeout=0.3, address="127.0.0.1").result()


def test_namespaces_do_not_meet_and_are_entered_once(
    threads: ThreadPoolExecutor,
) -> None:
    store = ThreadStore()
    for namespace in ("a", "b"):
        finish(*[begin(threads, store, rank, namespace=namespace) for rank in range(2)])
    tokens = {json.loads(store.values[f"{name}/0/host"])["token"] for name in "ab"}
    assert len(tokens) == 2
    with pytest.raises(TransportError, match="rank 0 entered the namespace 'a' twice"):
        connect(rank=0, ranks=2, store=store, namespace="a", timeout=0.3)


def test_ranks_that_disagree_on_their_number_are_told(threads: ThreadPoolExecutor) -> None:
    store = ThreadStore()
    begin(threads, store, 0, ranks=3, timeout=0.5)
    with pytest.raises(TransportError, match="rank 0 and rank 1 do not fit together") as raised:
        begin(threads, store, 1, timeout=0.5).result()
    assert "3 ranks" in str(raised.value)


def join_rank_1(threads: ThreadPoolExecutor, store: ThreadStore) -> Future[SocketTransport]:
    """Lets the real rank 1 come; its first facts are there already."""
    store.add("test/1/host/ready", -1)
    return begin(threads, store, 1)


@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\n\r\n" * 9, b"", b"FLEETPIP", os.urandom(500)],
    ids=["http", "silence", "half", "noise"],
)
def test_strangers_do_no_harm(threads: ThreadPoolExecutor, said: bytes) -> None:
    store = ThreadStore()
    rank_0 = waiting_rank(threads, store)
    strangers = [knock(address_of(store)) for _ in range(5)]
    for stranger in strangers:
        stranger.sendall(said)
    begun = time.monotonic()
    finish(rank_0, join_rank_1(threads, store))
    assert time.monotonic() - begun < peer_connections.STRANGER_SECONDS
    for stranger in strangers:
        stranger.close()


def test_another_secret_is_dropped_without_an_answer(
    threads: ThreadPoolExecutor,
) -> None:
    store = ThreadStore()
    rank_0 = waiting_rank(threads, store)
    with knock(address_of(store)) as stranger:
        side = connecting_side(b"wrong" * 6, 1, 0, 2)
        stranger.sendall(next(side))
        next(side)
        challenge = stranger.recv(32, socket.MSG_WAITALL)
        stranger.sendall(side.send(challenge))
        assert stranger.recv(1) == b""
    finish(rank_0, join_rank_1(threads, store))


def test_a_left_over_rank_is_named_once(threads: ThreadPoolExecutor, caplog: LogCapture) -> None:
    store = ThreadStore()
    rank_0 = waiting_rank(threads, store)
    for _ in range(2):
        with knock(address_of(store)) as stale:
            stale.sendall(next(connecting_side(b"s" * 32, 1, 0, 2, attempt=1)))
            assert stale.recv(1) == b""
    finish(rank_0, join_rank_1(threads, store))
    said = "rank 0 refused a rank 1 of attempt 1 of the job, which is in attempt 0"
    assert caplog.messages == [said]


def test_silent_strangers_are_dropped(threads: ThreadPoolExecutor, monkeypatch: Patch) -> None:
    monkeypatch.setattr(peer_connections, "STRANGER_SECONDS", 0.2)
    store = ThreadStore()
    rank_0 = waiting_rank(threads, store)
    with knock(address_of(store)) as stranger:
        begun = time.monotonic()
        assert stranger.recv(1) == b""
        assert time.monotonic() - begun > 0.1
    finish(rank_0, join_rank_1(threads, store))


def test_a_stranger_is_dropped_while_it_speaks(
    threads: ThreadPoolExecutor, monkeypatch: Patch
) -> None:
    busy, free = threading.Event(), threading.Event()
    accepted: list[peer_connections.PendingConnection] = []

    class Noted(peer_connections.PendingConnection):
        def __init__(self, *options: Any) -> None:
            super().__init__(*options)
            accepted.append(self)

        def advance(self) -> Any:
            if self is accepted[1]:
                busy.set()
                free.wait(LIMIT)
            return super().advance()

    monkeypatch.setattr(peer_connections, "PendingConnection", Noted)
    store = ThreadStore()
    rank_0 = waiting_rank(threads, store)
    strangers = [knock(address_of(store)) for _ in range(peer_connections.MOST_STRANGERS)]
    wait_until(lambda: len(accepted) == peer_connections.MOST_STRANGERS)
    strangers[1].sendall(b"GET")
    assert busy.wait(LIMIT)
    strangers.append(knock(address_of(store)))
    strangers[0].sendall(b"GET")
    free.set()
    finish(rank_0, join_rank_1(threads, store))
    for stranger in strangers:
        stranger.close()


def test_ten_thousand_strangers_keep_nobody_out(threads: ThreadPoolExecutor) -> None:
    """Rank 1 comes after the first 10,000, in the midst of more."""
    store = ThreadStore()
    rank_0 = waiting_rank(threads, store)
    name = "\0" + address_of(store).removeprefix("unix ")
    many, done = threading.Event(), threading.Event()

    def flood() -> int:
        crowd: deque[socket.socket] = deque()
        count = 0
        with contextlib.suppress(OSError):  # nobody listens any more, at the end
            while not done.is_set():
                crowd.append(socket.socket(socket.AF_UNIX))
                crowd[-1].connect(name)
                count += 1
                with contextlib.suppress(OSError):
                    crowd[-1].send(b"FLEETPIP" * (count % 20))
                if len(crowd) > 2 * peer_connections.MOST_STRANGERS:
                    crowd.popleft().close()
                if count == 10_000:
                    many.set()
        for sock in crowd:
            sock.close()
        return count

    flooding = threads.submit(flood)
    assert many.wait(60), rank_0.exception(0)
    finish(rank_0, join_rank_1(threads, store))
    done.set()
    assert flooding.result() >= 10_000


@pytest.mark.parametrize(
    "facts",
    [
        "7",
        "[]",
        "[" * 1000,
        "{}",
        '{"version": 2, "ranks": 2}',
        '{"version": 2, "ranks": 2, "tcp": "0", "host": 7, "secret": "", "token": ""}',
        "x" * 1_000_000,
    ],
)
def test_invalid_facts_are_refused_by_name(threads: ThreadPoolExecutor, facts: str) -> None:
    store = ThreadStore()
    store.set("test/1/host", facts)
    store.add("test/1/host/ready", 1)
    with pytest.raises(TransportError, match="as the facts of rank 1 is not valid") as raised:
        begin(threads, store, 0).result()
    assert len(str(raised.value)) < 1000


KEYS = {rank: f"here/{rank}" for rank in range(100)}


class CountingStore(ThreadStore):
    """Counts what is asked; each rank comes when it has been asked for thrice."""

    def __init__(self, never: Collection[int] = ()) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()
        self._never = {KEYS[rank] for rank in never}

    def add(self, key: str, amount: int) -> int:
        self.asked[key] += 1
        return int(self.asked[key] >= 3 and key not in self._never)


def test_who_has_come_may_end_while_others_are_missing(monkeypatch: Patch) -> None:
    store = CountingStore(never=[2])
    store.asked[KEYS[5]] = 3
    naps: list[float] = []
    monkeypatch.setattr(base.time, "sleep", naps.append)

    def failure(missing: list[int], ended: set[int]) -> PipelineTimeout:
        return PipelineTimeout(f"{missing} {sorted(ended)}")

    arriving = await_keys(
        store, KEYS, Limit(60), failure, lambda: [5], given_up=lambda: len(naps) > 20
    )
    with pytest.raises(PipelineTimeout, match=r"^\[2\] \[\]"):
        list(arriving)
    # It sleeps between its looks, longer and longer, and asks for nobody who has come.
    assert naps[0] < naps[-1] == max(naps)
    assert store.asked[KEYS[0]] == 3
