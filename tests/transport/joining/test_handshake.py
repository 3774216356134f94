"""Both ends prove that they know the secret, and tell nothing to who does not."""

from __future__ import annotations

import pytest

from fleetpipe.transport.joining.handshake import (
    Exchange,
    Greeting,
    Stale,
    Stranger,
    accepts,
    connects,
)

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
    own, theirs, said = talk(connects(SECRET, 2, 1, 4, stream=1), accepts(SECRET, 1, 4, streams=2))
    assert (own.peer, theirs.peer) == (1, 2)
    assert own.stream == theirs.stream == 1
    assert not any(SECRET in text for text in said)


def test_no_two_handshakes_are_alike() -> None:
    _, _, said = talk(connects(SECRET, 1, 0, 2), accepts(SECRET, 0, 2))
    _, _, again = talk(connects(SECRET, 1, 0, 2), accepts(SECRET, 0, 2))
    assert not set(said) & set(again)


@pytest.mark.parametrize(
    ("connecting", "accepting"),
    [
        (connects(OTHER, 1, 0, 2), accepts(SECRET, 0, 2)),
        (connects(SECRET, 1, 0, 3), accepts(SECRET, 0, 2)),
        (connects(SECRET, 2, 1, 3), accepts(SECRET, 0, 3)),
        (connects(SECRET, 0, 1, 3), accepts(SECRET, 1, 3)),
        (connects(SECRET, 7, 0, 3), accepts(SECRET, 0, 3)),
        (connects(SECRET, 1, 0, 2, stream=2), accepts(SECRET, 0, 2, streams=2)),
    ],
    ids=["secret", "ranks", "address", "lower", "unknown", "stream"],
)
def test_who_does_not_belong_is_refused(connecting: Exchange, accepting: Exchange) -> None:
    with pytest.raises(Stranger):
        talk(connecting, accepting)


@pytest.mark.parametrize("life", [1, 3])
def test_a_rank_of_another_life_is_refused_by_name(life: int) -> None:
    talk(connects(SECRET, 1, 0, 2, attempt=2), accepts(SECRET, 0, 2, attempt=2))
    said = f"a rank 1 of attempt {life} of the job, which is in attempt 2"
    with pytest.raises(Stale, match=said):
        talk(connects(SECRET, 1, 0, 2, attempt=life), accepts(SECRET, 0, 2, attempt=2))


@pytest.mark.parametrize("reflected", [False, True])
def test_the_connecting_end_is_not_deceived_either(reflected: bool) -> None:
    """Nor by what it says itself, sent back to it as the answer."""
    side = connects(SECRET, 1, 0, 2)
    next(side)
    next(side)
    proof = side.send(b"n" * 32)
    next(side)
    assert isinstance(proof, bytes)
    with pytest.raises(Stranger, match="did not prove"):
        side.send(proof if reflected else b"p" * 32)
