"""Bytes leave in order; the writer thread exists only where the kernel's buffer was full."""

from __future__ import annotations

import socket
import threading
import weakref

import pytest

from fleetpipe.transport.stream import Outbox

pytestmark = pytest.mark.once


def nothing() -> None:
    """What is sent stays alive by itself."""


def drain(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        data += sock.recv(1 << 20)
    return bytes(data)


def test_what_the_kernel_takes_needs_no_thread() -> None:
    mine, theirs = socket.socketpair()
    outbox = Outbox(mine, lambda: None)
    for _ in range(20):
        outbox.put([b"ab", memoryview(b"cd")], 4, nothing)
        assert drain(theirs, 4) == b"abcd"
    assert outbox.backlog == 0
    assert "fleetpipe-writer" not in {thread.name for thread in threading.enumerate()}
    mine.close()
    theirs.close()


def test_the_rest_goes_in_order_through_the_writer() -> None:
    mine, theirs = socket.socketpair()
    told = threading.Event()
    outbox = Outbox(mine, told.set)
    large = bytes(range(256)) * (1 << 14)
    outbox.put([large[:100], memoryview(large)[100:]], len(large), nothing)
    kept, gone = [threading.Event()], threading.Event()
    weakref.finalize(kept[0], gone.set)
    outbox.put([b"after"], 5, kept.pop)
    assert 0 < outbox.backlog <= len(large) + 5
    outbox.request_wake()
    assert drain(theirs, len(large) + 5) == large + b"after"
    assert told.wait(5.0)
    assert gone.wait(5.0), "what is sent is alive for as long as nothing else is"
    mine.shutdown(socket.SHUT_RDWR)
    outbox.close()
    assert "fleetpipe-writer" not in {thread.name for thread in threading.enumerate()}
    mine.close()
    theirs.close()


@pytest.mark.parametrize("size", [10, 1 << 23])
def test_a_broken_stream_is_told_to_the_next_caller(size: int) -> None:
    mine, theirs = socket.socketpair()
    told = threading.Event()
    outbox = Outbox(mine, told.set)
    outbox.put([bytes(size)], size, nothing)
    outbox.request_wake()
    theirs.close()
    assert size == 10 or told.wait(5.0)
    with pytest.raises(OSError, match=r"Broken pipe|reset"):
        outbox.put([b"x"], 1, nothing)
    assert outbox.backlog == 0
    outbox.close()
    mine.close()
