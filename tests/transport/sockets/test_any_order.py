"""Waits for whichever of several messages comes first, over sockets and a view of them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

import pytest

from fleetpipe.errors import PeerFailed, PipelineTimeout
from fleetpipe.transport import SocketTransport
from fleetpipe.transport.base import View
from tests.transport.helpers import LIMIT, backward, forward, sample

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
