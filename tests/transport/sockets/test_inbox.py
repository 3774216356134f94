"""Streams that are cut, damaged or not a peer's at all."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpipe.errors import PeerFailed, TransportError
from fleetpipe.transport import SocketTransport
from fleetpipe.transport.sockets.inbox import STAGE_BYTES
from fleetpipe.transport.wire.message import HEADER_BYTES, MESSAGE, Route, pack_header
from fleetpipe.transport.wire.structure import Structure, encode
from tests.transport.helpers import LIMIT, forward, same, sample

ROUTE = Route(forward(3), 1, 0)


def frame(announcement: bytes, payload: bytes, channel: int = 0, structure: int = 1) -> bytes:
    """Returns the bytes of F of edge 0>1, micro-batch 3."""
    header = (MESSAGE, ord("F"), 0, 1, channel, structure, 3, len(announcement), len(payload))
    return pack_header(header) + announcement + payload


FOUR_BYTES = encode("", Structure(("tensor", "float32", (1,), True)), ROUTE)


@pytest.fixture
def ends() -> Iterator[tuple[SocketTransport, socket.socket]]:
    """A transport of rank 0 and the bare socket at the place of rank 1."""
    mine, theirs = socket.socketpair()
    transport = SocketTransport(0, 2, {1: mine}, timeout=LIMIT)
    yield transport, theirs
    theirs.close()
    transport.close()


def damage(ends: tuple[SocketTransport, socket.socket], data: bytes) -> str:
    """Returns the text of the error that ``data`` causes."""
    transport, theirs = ends
    theirs.sendall(data)
    with pytest.raises(TransportError, match="rank 1 sent bytes that are no message") as raised:
        transport.receive(1, forward(3), LIMIT)
    with pytest.raises(TransportError, match="rank 1 sent bytes"):
        transport.try_receive(1, forward(4))
    return str(raised.value)


def test_a_sound_frame(ends: tuple[SocketTransport, socket.socket]) -> None:
    ends[1].sendall(frame(FOUR_BYTES, b"\0\0\x80\x3f"))
    assert ends[0].receive(1, forward(3), LIMIT).tolist() == [1.0]


@given(cuts=st.lists(st.integers(1, 200), min_size=1, max_size=6), size=st.integers(0, 9000))
def test_frames_in_pieces(cuts: list[int], size: int) -> None:
    """However the stream is cut, the same messages come out of it."""
    tensor = sample("float64", [size], seed=size)
    assert size * 8 < 5 * STAGE_BYTES
    announcement = encode("", Structure(("tensor", "float64", (size,), True)), ROUTE)
    payload = tensor.numpy().tobytes()
    data = frame(announcement, payload) + frame(b"", payload)
    mine, theirs = socket.socketpair()
    transport = SocketTransport(0, 2, {1: mine}, timeout=LIMIT)
    received = []
    for cut in [*cuts, len(data)]:
        theirs.sendall(data[:cut])
        data = data[cut:]
        arrived, value = transport.try_receive(1, forward(3))
        received += [value] * arrived
    while len(received) < 2:
        received.append(transport.receive(1, forward(3), LIMIT))
    assert same(received, [tensor, tensor])
    theirs.close()
    transport.close()


def test_tensors_made_ahead_belong_to_one_message_each(
    ends: tuple[SocketTransport, socket.socket],
) -> None:
    transport, theirs = ends
    theirs.sendall(frame(FOUR_BYTES, struct.pack("<f", 0.0)))
    for number in range(1, 40):
        theirs.sendall(frame(b"", struct.pack("<f", number)))
    received = [transport.receive(1, forward(3), LIMIT) for _ in range(40)]
    assert [tensor.item() for tensor in received] == [float(number) for number in range(40)]
    assert len({tensor.data_ptr() for tensor in received}) == 40


def sent_before(seconds: float, data: bytes) -> bytes:
    """A frame as if it had been on its way for so long."""
    moment = struct.pack("<Q", time.monotonic_ns() - int(seconds * 1e9))
    return data[: HEADER_BYTES - 8] + moment + data[HEADER_BYTES:]


def test_the_quickest_of_the_largest_messages_that_were_waited_for_is_timed(
    ends: tuple[SocketTransport, socket.socket],
) -> None:
    transport, theirs = ends
    eight_bytes = encode("", Structure(("tensor", "float64", (1,), True)), ROUTE)
    for seconds, data in (
        (90, frame(eight_bytes, b"12345678", channel=1)),
        (60, frame(b"", b"12345678", channel=1)),
        (30, frame(FOUR_BYTES, b"1234")),
    ):
        theirs.sendall(sent_before(seconds, data))
        transport.receive(1, forward(3), LIMIT)
    later = threading.Timer(0.1, theirs.sendall, [sent_before(120, frame(b"", b"1234"))])
    assert transport.flights() == {1: pytest.approx(60, abs=20)}
    theirs.sendall(sent_before(60, frame(b"", b"12345678", channel=1)))
    transport.receive(1, forward(3), LIMIT)
    later.start()
    transport.receive(1, forward(3), LIMIT)
    assert transport.flights() == {1: pytest.approx(120, abs=20)}
    assert transport.flights() == {}


def test_garbage(ends: tuple[SocketTransport, socket.socket]) -> None:
    message = damage(ends, b"GET / HTTP/1.1\r\nHost: www.example.org\r\nAccept: text/html\r\n\r\n")
    assert "damaged header" in message
    assert "the stream between messages from rank 1" in message


def test_garbage_after_a_sound_frame(ends: tuple[SocketTransport, socket.socket]) -> None:
    ends[1].sendall(frame(FOUR_BYTES, b"\0\0\x80\x3f") + b"\0" * HEADER_BYTES)
    assert ends[0].receive(1, forward(3), LIMIT).tolist() == [1.0]
    with pytest.raises(TransportError, match="damaged header"):
        ends[0].receive(1, forward(3), LIMIT)


def test_an_announcement_that_is_none(ends: tuple[SocketTransport, socket.socket]) -> None:
    message = damage(ends, frame(b"[1, 2", b""))
    assert "F of edge 0>1, micro-batch 3 from rank 1" in message
    assert "announcement is damaged" in message


@pytest.mark.parametrize(
    "data",
    [
        frame(FOUR_BYTES, b"12345"),
        frame(b"", b"1234"),
        frame(FOUR_BYTES, b"1234") + frame(b"", b"1234", structure=2),
        frame(FOUR_BYTES, b"1234") + frame(b"", b"1234", channel=1),
        frame(FOUR_BYTES, b"1234") + frame(b"", b""),
    ],
    ids=["payload", "unannounced", "structure", "channel", "nothing"],
)
def test_a_frame_that_does_not_fit_what_was_announced(
    ends: tuple[SocketTransport, socket.socket], data: bytes
) -> None:
    transport, theirs = ends
    theirs.sendall(data)
    if len(data) > 2 * HEADER_BYTES:
        transport.receive(1, forward(3), LIMIT)
    with pytest.raises(TransportError, match="does not fit what was announced") as raised:
        transport.receive(1, forward(3), LIMIT)
    assert "F of edge 0>1, micro-batch 3 from rank 1" in str(raised.value)


@pytest.mark.parametrize("length", [HEADER_BYTES - 1, HEADER_BYTES + 5, -1])
def test_an_end_within_a_message_is_the_death_of_the_peer(
    ends: tuple[SocketTransport, socket.socket], length: int
) -> None:
    transport, theirs = ends
    theirs.sendall(frame(FOUR_BYTES, b"1234")[:length])
    theirs.close()
    what = "header" if length == HEADER_BYTES - 1 else "F of edge 0>1, micro-batch 3"
    words = f"rank 1 is gone: its connection closed within a message, a truncated {what}"
    with pytest.raises(PeerFailed, match=words) as raised:
        transport.receive(1, forward(3), LIMIT)
    assert "F of edge 0>1, micro-batch 3 from rank 1 to rank 0" in str(raised.value)
    if length != HEADER_BYTES - 1:
        assert "a part of F of edge 0>1, micro-batch 3" in str(raised.value)


def test_what_came_before_the_death_is_delivered(
    ends: tuple[SocketTransport, socket.socket],
) -> None:
    transport, theirs = ends
    theirs.sendall(frame(FOUR_BYTES, b"\0\0\x80\x3f") + frame(b"", b"\0\0\0\0")[:-2])
    theirs.close()
    assert transport.receive(1, forward(3), LIMIT).tolist() == [1.0]
    with pytest.raises(PeerFailed):
        transport.receive(1, forward(3), LIMIT)
    with pytest.raises(PeerFailed):
        transport.send(1, forward(0), sample("float32", [1 << 20]))
