"""What arrives: in any order, in the host's memory, or from streams that are cut or damaged."""

from __future__ import annotations

import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpipe.checkpoint.ranks import Ranks
from fleetpipe.errors import PeerFailed, PipelineTimeout, TransportError
from fleetpipe.mesh.groups import DirectGroup
from fleetpipe.transport import SocketTransport
from fleetpipe.transport.base import View
from fleetpipe.transport.inbox import STAGING_BYTES
from fleetpipe.transport.wire import bridge
from fleetpipe.transport.wire.structure import (
    HEADER_BYTES,
    MESSAGE,
    Route,
    Structure,
    encode,
    pack_header,
)
from tests.fixtures import Patch
from tests.transport.helpers import LIMIT, backward, forward, same, sample

ROUTE = Route(forward(3), 1, 0)
Ends = tuple[SocketTransport, socket.socket]


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


def damage(ends: Ends, data: bytes) -> str:
    """Returns the text of the error that ``data`` causes."""
    transport, theirs = ends
    theirs.sendall(data)
    with pytest.raises(TransportError, match="rank 1 sent bytes that are no message") as raised:
        transport.receive(1, forward(3), LIMIT)
    with pytest.raises(TransportError, match="rank 1 sent bytes"):
        transport.try_receive(1, forward(4))
    return str(raised.value)


@given(cuts=st.lists(st.integers(1, 200), min_size=1, max_size=6), size=st.integers(0, 9000))
def test_frames_in_pieces(cuts: list[int], size: int) -> None:
    """However the stream is cut, the same messages come out of it."""
    tensor = sample("float64", [size], seed=size)
    assert size * 8 < 5 * STAGING_BYTES
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


def test_tensors_made_ahead_belong_to_one_message(
    ends: Ends,
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


def test_the_quickest_of_the_largest_messages_is_timed(
    ends: Ends,
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


def test_garbage_after_a_sound_frame(ends: Ends) -> None:
    ends[1].sendall(frame(FOUR_BYTES, b"\0\0\x80\x3f"))
    assert ends[0].receive(1, forward(3), LIMIT).tolist() == [1.0]
    message = damage(ends, b"GET / HTTP/1.1\r\nHost: www.example.org\r\nAccept: text/html\r\n\r\n")
    assert "damaged header" in message
    assert "the stream between messages from rank 1" in message


def test_an_announcement_that_is_none(ends: Ends) -> None:
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
def test_a_frame_that_does_not_fit(ends: Ends, data: bytes) -> None:
    transport, theirs = ends
    theirs.sendall(data)
    if len(data) > 2 * HEADER_BYTES:
        transport.receive(1, forward(3), LIMIT)
    with pytest.raises(TransportError, match="does not fit what was announced") as raised:
        transport.receive(1, forward(3), LIMIT)
    assert "F of edge 0>1, micro-batch 3 from rank 1" in str(raised.value)


@pytest.mark.parametrize("length", [HEADER_BYTES - 1, HEADER_BYTES + 5, -1])
def test_an_end_within_a_message_is_a_death(ends: Ends, length: int) -> None:
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


def test_what_came_before_a_death_is_delivered(
    ends: Ends,
) -> None:
    transport, theirs = ends
    theirs.sendall(frame(FOUR_BYTES, b"\0\0\x80\x3f") + frame(b"", b"\0\0\0\0")[:-2])
    theirs.close()
    assert transport.receive(1, forward(3), LIMIT).tolist() == [1.0]
    with pytest.raises(PeerFailed):
        transport.receive(1, forward(3), LIMIT)
    with pytest.raises(PeerFailed):
        transport.send(1, forward(0), sample("float32", [1 << 20]))


Join = Callable[..., list[SocketTransport]]

#: A value of rank 0, and a gradient of rank 2.
AWAITED = [(0, forward(3)), (2, backward(1, source=1, target=2))]


def send_late(transport: SocketTransport, index: int, value: object) -> None:
    """Sends one of the awaited messages from its rank in a moment."""
    threading.Timer(0.1, transport.send, (1, AWAITED[index][1], value)).start()


@pytest.mark.parametrize("index", [0, 1])
def test_the_one_that_comes_ends_the_wait(sockets: Join, index: int) -> None:
    ranks = sockets(3)
    send_late(ranks[AWAITED[index][0]], index, sample("float32", [600, 600]))
    ranks[1].await_any(AWAITED, LIMIT, math.inf)
    assert [ranks[1].try_receive(*one)[0] for one in AWAITED] == [index == 0, index == 1]


def test_one_that_was_read_for_another_is_found(sockets: Join) -> None:
    ranks = sockets(3)
    ranks[0].send(1, forward(3), "kept")
    ranks[0].send(1, forward(4), "wanted")
    assert ranks[1].receive(0, forward(4), LIMIT) == "wanted"
    ranks[1].await_any(AWAITED[::-1], LIMIT, math.inf)
    assert ranks[1].try_receive(*AWAITED[0]) == (True, "kept")


def test_patience_ends_without_an_error(sockets: Join) -> None:
    begin = time.monotonic()
    sockets(3)[1].await_any(AWAITED, LIMIT, 0.05)
    assert 0.04 < time.monotonic() - begin < LIMIT / 2


def test_a_timeout_names_the_first_and_counts_the_others(sockets: Join) -> None:
    with pytest.raises(PipelineTimeout) as caught:
        sockets(3)[1].await_any(AWAITED, 0.05, math.inf)
    assert "waited 0.05 s for a message of rank 0" in str(caught.value)
    assert "or one of 1 others that it could go on with" in str(caught.value)


def test_the_death_of_any_peer_ends_the_wait(sockets: Join) -> None:
    ranks = sockets(3)
    ranks[2].close("out of memory")
    with pytest.raises(PeerFailed, match="rank 2 has left: out of memory"):
        ranks[1].await_any(AWAITED, LIMIT, math.inf)


def test_a_view_waits_for_its_members(sockets: Join) -> None:
    ranks = sockets(3)
    view = View(ranks[2], [2, 0])
    threading.Timer(0.1, ranks[0].send, (2, forward(0), 5)).start()
    view.await_any([(1, forward(0))], LIMIT, math.inf)
    assert view.try_receive(1, forward(0)) == (True, 5)


def test_bytes_of_files_stay_there(
    sockets: Callable[..., list[SocketTransport]], monkeypatch: Patch
) -> None:
    moved: list[int] = []
    monkeypatch.setattr(bridge, "device_kind", lambda: "gpu")
    # NumPy's memory takes Python's lock when it is freed, for which CUDA's threads would wait.
    monkeypatch.setattr(bridge.dlpack, "from_dlpack", None)
    monkeypatch.setattr(bridge, "to_device", lambda x: moved.append(int(x.size)) or x)
    transports = sockets(2)
    job: Any = SimpleNamespace(timeout=LIMIT)
    one, other = (Ranks(DirectGroup(transport, LIMIT), job) for transport in transports)
    parts = [np.arange(n, dtype="uint8") for n in (3, 200, 0)]
    other.send_parts(part.data for part in parts)
    received = [one.receive_part(1) for _ in parts]
    assert [x.numpy().tobytes() for x in received] == [part.tobytes() for part in parts]
    assert moved == []
    transports[1].send(0, forward(0), sample("float32", [5]))
    transports[0].receive(1, forward(0), LIMIT)
    assert moved == [5]
