"""Who may connect: what listens, a secret that both ends prove, and limits of waits."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

import fleetpipe.transport
from fleetpipe.transport.base import LOOK_SECONDS, STOPPED_SECONDS, Limit
from fleetpipe.transport.handshake import (
    Exchange,
    Greeting,
    Stale,
    Stranger,
    accepting_side,
    connecting_side,
)
from tests.check_types import ROOT, sources, tree
from tests.fixtures import Clock, Patch

pytestmark = pytest.mark.no_paddle

SECRET, OTHER = b"s" * 32, b"o" * 32


def talk(one: Exchange, other: Exchange) -> tuple[Greeting, Greeting, list[bytes]]:
    """Runs both sides against each other; returns their results and all that was said."""
    results: dict[Exchange, Greeting] = {}
    steps = {one: next(one), other: next(other)}
    said: list[bytes] = []
    pipes: dict[Exchange, bytes] = {one: b"", other: b""}
    while len(results) < 2:
        for side, peer in ((one, other), (other, one)):
            if side in results:
                continue
            step = steps[side]
            try:
                if isinstance(step, bytes):
                    said.append(step)
                    pipes[peer] += step
                    steps[side] = next(side)
                elif len(pipes[side]) >= step:
                    given, pipes[side] = pipes[side][:step], pipes[side][step:]
                    steps[side] = side.send(given)
            except StopIteration as end:
                results[side] = end.value
    return results[one], results[other], said


def test_peers_learn_who_the_other_is() -> None:
    own, theirs, said = talk(
        connecting_side(SECRET, 2, 1, 4, stream=1), accepting_side(SECRET, 1, 4, streams=2)
    )
    assert (own.peer, theirs.peer) == (1, 2)
    assert own.stream == theirs.stream == 1
    assert not any(SECRET in text for text in said)


def test_no_two_handshakes_are_alike() -> None:
    _, _, said = talk(connecting_side(SECRET, 1, 0, 2), accepting_side(SECRET, 0, 2))
    _, _, again = talk(connecting_side(SECRET, 1, 0, 2), accepting_side(SECRET, 0, 2))
    assert not set(said) & set(again)


@pytest.mark.parametrize(
    ("connecting", "accepting"),
    [
        (connecting_side(OTHER, 1, 0, 2), accepting_side(SECRET, 0, 2)),
        (connecting_side(SECRET, 1, 0, 3), accepting_side(SECRET, 0, 2)),
        (connecting_side(SECRET, 2, 1, 3), accepting_side(SECRET, 0, 3)),
        (connecting_side(SECRET, 0, 1, 3), accepting_side(SECRET, 1, 3)),
        (connecting_side(SECRET, 7, 0, 3), accepting_side(SECRET, 0, 3)),
        (connecting_side(SECRET, 1, 0, 2, stream=2), accepting_side(SECRET, 0, 2, streams=2)),
    ],
    ids=["secret", "ranks", "address", "lower", "unknown", "stream"],
)
def test_who_does_not_belong_is_refused(connecting: Exchange, accepting: Exchange) -> None:
    with pytest.raises(Stranger):
        talk(connecting, accepting)


@pytest.mark.parametrize("life", [1, 3])
def test_a_rank_of_another_life_is_refused_by_name(life: int) -> None:
    talk(connecting_side(SECRET, 1, 0, 2, attempt=2), accepting_side(SECRET, 0, 2, attempt=2))
    said = f"a rank 1 of attempt {life} of the job, which is in attempt 2"
    with pytest.raises(Stale, match=said):
        talk(
            connecting_side(SECRET, 1, 0, 2, attempt=life), accepting_side(SECRET, 0, 2, attempt=2)
        )


@pytest.mark.parametrize("reflected", [False, True])
def test_the_connecting_end_is_not_deceived_either(reflected: bool) -> None:
    """Nor by what it says itself, sent back to it as the answer."""
    side = connecting_side(SECRET, 1, 0, 2)
    next(side)
    next(side)
    proof = side.send(b"n" * 32)
    next(side)
    assert isinstance(proof, bytes)
    with pytest.raises(Stranger, match="did not prove"):
        side.send(proof if reflected else b"p" * 32)


#: Calls after which somebody may connect. To bind a port alone only shows that it is free.
LISTENS = {
    *("listen", "create_server", "start_server", "create_unix_server", "Listener"),
    *("TCPStore", "HTTPServer", "ThreadingHTTPServer", "TCPServer", "serve_forever", "KVServer"),
}


def test_nothing_else_listens() -> None:
    found = set()
    for file in sources(ROOT):
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name in LISTENS:
                    found.add((str(file.relative_to(ROOT)), name))
    assert found == {
        ("fleetpipe/transport/hosts.py", "listen"),
        ("fleetpipe/transport/hosts.py", "Listener"),  # what it returns
        ("fleetpipe/paddle_api/distributed.py", "TCPStore"),
        ("fleetpipe/contrib/view/showing/server.py", "start_server"),  # where it is asked for
    }


def test_a_wait_that_looks_often_ends_in_time(monkeypatch: Patch) -> None:
    clock, limit = Clock(monkeypatch), Limit(5)
    naps = 0
    while not limit.reached():
        clock.now += limit.nap()
        naps += 1
    assert clock.now == 5
    assert naps == 5 / LOOK_SECONDS
    clock.now += 1.5
    assert limit.nap() == 0


def test_time_in_which_the_process_was_stopped_does_not_count(monkeypatch: Patch) -> None:
    clock, limit = Clock(monkeypatch), Limit(60)
    for _ in range(9):
        clock.now += limit.nap()
    clock.now += 3600
    assert limit.seconds_left() == 60
    clock.now += STOPPED_SECONDS
    assert limit.seconds_left() == 60 - STOPPED_SECONDS


def test_the_interface_loads_no_paddle() -> None:
    program = (
        "import sys; from fleetpipe.transport import MessageKey, Transport, Value, describe; "
        "sys.exit('paddle' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_every_public_name_is_there() -> None:
    for name in fleetpipe.transport.__all__:
        assert getattr(fleetpipe.transport, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'rendezvous_point'"):
        _ = fleetpipe.transport.rendezvous_point
