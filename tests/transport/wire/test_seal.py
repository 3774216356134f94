"""With a secret of the user's, every part of a stream is from its peer, whole and in its place."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpipe.errors import ConfigError, PeerFailed, TransportError
from fleetpipe.transport import SocketTransport, connect
from fleetpipe.transport.joining.connections import join
from fleetpipe.transport.joining.handshake import accepts, connects, user_secret
from fleetpipe.transport.wire.seal import Seal, Seals
from tests.fixtures import Call, Patch
from tests.transport.helpers import LIMIT, ThreadStore, backward, forward, join_all, same, sample
from tests.transport.joining.test_handshake import talk

SECRET = "correct horse battery staple"
KEY, OTHER = b"k" * 32, b"o" * 32


@pytest.fixture
def ends() -> Iterator[tuple[SocketTransport, SocketTransport, socket.socket, socket.socket]]:
    """Two sealed transports, between which the test carries the bytes."""
    mine, one = socket.socketpair()
    theirs, other = socket.socketpair()
    first = SocketTransport(
        0, 2, {1: mine}, timeout=LIMIT, seals={1: Seals(Seal(KEY), Seal(OTHER))}
    )
    second = SocketTransport(
        1, 2, {0: theirs}, timeout=LIMIT, seals={0: Seals(Seal(OTHER), Seal(KEY))}
    )
    for sock in (one, other):
        sock.settimeout(LIMIT)
    yield first, second, one, other
    for end in (one, other):
        end.close()
    for transport in (first, second):
        transport.close()


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
def test_messages_pass(tcp: bool, monkeypatch: Patch) -> None:
    monkeypatch.setenv("FLEETPIPE_SECRET", SECRET)
    first, second, third = join_all(3, force_tcp=tcp)
    values = [None, 7, {"x": sample("float32", [300, 1000]), "y": sample("bool", [3])}, "text"]
    for k, value in enumerate(values):
        first.send(1, forward(k), value)
        third.send(1, forward(k), value)
        second.send(0, backward(k), value)
    for k, value in enumerate(values):
        assert same(second.receive(2, forward(k), LIMIT), value)
        assert same(second.receive(0, forward(k), LIMIT), value)
        assert same(first.receive(1, backward(k), LIMIT), value)
    first.close("enough")
    with pytest.raises(PeerFailed, match="rank 0 has left: enough"):
        second.receive(0, forward(9), LIMIT)
    for transport in (second, third):
        transport.close()


def test_without_a_secret_nothing_is_sealed() -> None:
    first, second = join_all(2)
    assert first._connections[1]._seal is None
    assert first._connections[1].inbox._seal is None
    first.close()
    second.close()


Ends = tuple[SocketTransport, SocketTransport, socket.socket, socket.socket]


def sent(ends: Ends, values: int) -> list[bytes]:
    """Has rank 0 send some values; returns the bytes of each message."""
    frames = []
    for k in range(values):
        ends[0].send(1, forward(k), sample("float32", [3], seed=k))
        frames.append(ends[2].recv(1 << 16))
    return frames


def refused(ends: Ends, micro_batch: int) -> None:
    with pytest.raises(TransportError, match="rank 0 sent bytes that are no message") as raised:
        ends[1].receive(0, forward(micro_batch), LIMIT)
    assert "does not have the seal" in str(raised.value)


def test_carried_as_they_are_messages_pass(ends: Ends) -> None:
    for k, frame in enumerate(sent(ends, 3)):
        ends[3].sendall(frame)
        assert same(ends[1].receive(0, forward(k), LIMIT), sample("float32", [3], seed=k))


@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_bit_that_was_changed_on_the_way(where: float, bit: int) -> None:
    sending, receiving = Seal(KEY), Seal(KEY)
    part = bytearray(b"header and payload")
    seal = bytearray(sending.of([part]))
    whole = part + seal
    whole[int(where * len(whole))] ^= 1 << bit
    with pytest.raises(TransportError, match="does not have the seal"):
        receiving.check([whole[: len(part)]], whole[len(part) :])


@pytest.mark.parametrize("at", [0, 10, 50, 70, -30, -1])
def test_a_message_that_was_changed(ends: Ends, at: int) -> None:
    frame = bytearray(sent(ends, 1)[0])
    frame[at] ^= 1
    ends[3].sendall(frame)
    refused(ends, 0)


def test_a_message_that_is_repeated(ends: Ends) -> None:
    frames = sent(ends, 2)
    ends[3].sendall(frames[0] + frames[1] + frames[1])
    ends[1].receive(0, forward(0), LIMIT)
    ends[1].receive(0, forward(1), LIMIT)
    refused(ends, 1)


def test_a_message_that_is_left_out(ends: Ends) -> None:
    frames = sent(ends, 3)
    ends[3].sendall(frames[0] + frames[2])
    ends[1].receive(0, forward(0), LIMIT)
    refused(ends, 2)


def test_a_message_that_is_sent_back(ends: Ends) -> None:
    ends[2].sendall(sent(ends, 1)[0])
    with pytest.raises(TransportError, match="rank 1 sent bytes"):
        ends[0].receive(1, forward(0), LIMIT)


def test_each_connection_has_keys_of_its_own_that_both_ends_know() -> None:
    (*_, dialled), (*_, accepted), _ = talk(connects(KEY, 1, 0, 2), accepts(KEY, 0, 2))
    (*_, again), _, _ = talk(connects(KEY, 1, 0, 2), accepts(KEY, 0, 2))
    seals = [dialled.outgoing.of([b"x"]), dialled.incoming.of([b"x"]), again.outgoing.of([b"x"])]
    assert len(set(seals)) == 3
    assert accepted.incoming.of([b"x"]) == seals[0]
    assert accepted.outgoing.of([b"x"]) == seals[1]


# The secret


def begin(store: ThreadStore, secrets: list[str]) -> list[Any]:
    """Connects ranks with these secrets; returns what each has or raised."""
    local = threading.local()

    def one(rank: int) -> Any:
        local.secret = secrets[rank].encode()
        try:
            return connect(
                rank=rank, ranks=len(secrets), store=store, namespace="test", timeout=LIMIT
            )
        except TransportError as error:
            return error

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(secrets)) as threads:
        patch.setattr("fleetpipe.transport.joining.handshake.user_secret", lambda: local.secret)
        return list(threads.map(one, range(len(secrets))))


@pytest.mark.parametrize(
    ("secrets", "got"),
    [
        ([SECRET, SECRET + "!"], ["a secret on rank 0, a secret on rank 1"]),
        ([SECRET, ""], ["a secret on rank 0, no secret on rank 1"]),
        (["", SECRET], ["no secret on rank 0, a secret on rank 1"]),
    ],
)
def test_ranks_with_other_secrets_say_so_at_once(secrets: list[str], got: list[str]) -> None:
    for error in begin(ThreadStore(), secrets):
        assert isinstance(error, TransportError)
        assert "were not given the same secret" in str(error)
    assert got[0] in str(begin(ThreadStore(), secrets)[0])


def test_the_secret_is_not_in_the_store_and_what_is_there_does_not_do(
    monkeypatch: Patch,
) -> None:
    store = ThreadStore()
    for transport in begin(store, [SECRET, SECRET]):
        transport.close()
    assert SECRET not in str(store.values)
    assert SECRET.encode().hex() not in str(store.values)


@pytest.mark.parametrize(
    "set_up",
    [
        lambda patch, file: patch.setenv("FLEETPIPE_SECRET", SECRET),
        lambda patch, file: (
            patch.setenv("FLEETPIPE_SECRET_FILE", str(file)),
            file.write_text(SECRET + "\n"),
        ),
    ],
    ids=["variable", "file"],
)
def test_where_the_secret_is_from(set_up: Call, monkeypatch: Patch, tmp_path: Path) -> None:
    assert user_secret() == b""
    set_up(monkeypatch, tmp_path / "secret")
    assert user_secret() == SECRET.encode()


def test_a_secret_that_is_none(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLEETPIPE_SECRET_FILE", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="cannot read FLEETPIPE_SECRET_FILE="):
        join(rank=0, ranks=2, store=ThreadStore(), namespace="test", timeout=LIMIT)
    monkeypatch.setenv("FLEETPIPE_SECRET", "short")
    with pytest.raises(ConfigError, match="FLEETPIPE_SECRET is too short") as raised:
        user_secret()
    assert "short" not in str(raised.value).replace("too short", "")
