"""What two supervisors tell each other, and when one takes the other for lost."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator

import pytest

from fleetpipe.launch.supervisor import link as links
from fleetpipe.launch.supervisor.link import Link
from fleetpipe.transport.joining.handshake import Stranger, accepts, connects
from tests.transport.joining.test_handshake import talk

Pair = tuple[Link, Link, socket.socket]


@pytest.fixture(params=["open", "sealed"])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Both ends of a connection, and the socket of the second."""
    monkeypatch.delenv("FLEETPIPE_SECRET", raising=False)
    if request.param == "sealed":
        monkeypatch.setenv("FLEETPIPE_SECRET", "correct horse battery staple")
    follower, leader, _ = talk(
        connects(links.secret(), links.FOLLOWER, links.LEADER, links.SIDES),
        accepts(links.secret(), links.LEADER, links.SIDES),
    )
    ends = socket.socketpair()
    made = Link(ends[0], leader), Link(ends[1], follower)
    yield (*made, ends[1])
    for each in made:
        each.close()


def test_messages_come_in_their_order(pair: Pair) -> None:
    leader, follower, _ = pair
    leader.tell("expect", life=3, nodes=2, node=1)
    leader.tell("stop")
    assert [*follower.hear()] == [
        {"kind": "expect", "life": 3, "nodes": 2, "node": 1},
        {"kind": "stop"},
    ]
    assert [*follower.hear()] == []
    assert not follower.lost


@pytest.mark.parametrize(
    "message",
    [{"kind": "begun"}, {"kind": "stop", "now": 1}, {"kind": "over", "code": "0"}, [], "stop", 3],
)
def test_what_is_no_message_ends_the_connection(pair: Pair, message: object) -> None:
    leader, _, theirs = pair
    text = json.dumps(message).encode()
    theirs.send(struct.pack("<I", len(text)) + text + b"s" * 64)
    assert [*leader.hear()] == []
    assert leader.lost


def test_one_that_ends_or_says_nothing_is_lost(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower, _ = pair
    monkeypatch.setattr(links, "LOST_SECONDS", 0.0)
    assert leader.lost
    monkeypatch.setattr(links, "LOST_SECONDS", 60.0)
    assert not leader.lost
    follower.say_alive()  # it is not due yet
    assert [*leader.hear()] == []
    monkeypatch.setattr(links, "ALIVE_SECONDS", 0.0)
    follower.say_alive()
    assert [*leader.hear()] == [{"kind": "alive"}]
    follower.close()
    assert [*leader.hear()] == []
    assert leader.lost


def test_who_was_given_another_secret_is_a_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for given in ("correct horse battery staple", "correct horse battery stapler"):
        monkeypatch.setenv("FLEETPIPE_SECRET", given)
        keys.append(links.secret())
    with pytest.raises(Stranger):
        talk(
            connects(keys[0], links.FOLLOWER, links.LEADER, links.SIDES),
            accepts(keys[1], links.LEADER, links.SIDES),
        )
