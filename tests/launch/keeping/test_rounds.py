"""Which state is copied next, and who gives back what: decided without any host."""

from __future__ import annotations

import pytest

from fleetpipe.launch.keeping.places import Claim, Gift, gifts, placed
from fleetpipe.launch.keeping.rounds import FAILED, MISSED, WHOLE, Rounds
from fleetpipe.launch.keeping.slots import Stamp


def test_a_state_is_safe_when_all_hosts_have_copied_it() -> None:
    rounds = Rounds(life=5, nodes=3, every=10)
    assert rounds.due(3) == Stamp(5, 10)
    assert rounds.due(9) is None
    for node in (2, 0):
        rounds.told(node, 10, WHOLE)
        assert rounds.safe is None
    rounds.told(2, 10, WHOLE)  # twice is once
    assert rounds.due(10) is None
    rounds.told(1, 10, WHOLE)
    assert rounds.safe == Stamp(5, 10)
    # The step may be counted as done a little later than its state is kept.
    assert rounds.due(9) == Stamp(5, 20)


def test_a_copy_that_takes_long_leaves_out_steps() -> None:
    rounds = Rounds(life=5, nodes=1, every=10)
    assert rounds.due(0) == Stamp(5, 10)
    rounds.told(0, 10, WHOLE)
    assert rounds.due(34) == Stamp(5, 40)


def test_steps_that_are_faster_than_news_are_met_further_ahead_each_time() -> None:
    rounds = Rounds(life=5, nodes=2, every=1)
    asked, done = [], 0
    while len(asked) < 5:
        state = rounds.due(done)
        assert state is not None
        asked.append(state.step - done)
        done += 9
        rounds.told(0, state.step, WHOLE)
        rounds.told(1, state.step, MISSED if state.step < done else WHOLE)
    assert asked == [1, 2, 4, 8, 16]
    assert rounds.safe == Stamp(5, 36 + 16)
    assert rounds.due(60) == Stamp(5, 61)


def test_a_round_that_fails_or_is_over_makes_nothing_safe() -> None:
    rounds = Rounds(life=5, nodes=2, every=10)
    rounds.due(0)
    rounds.told(0, 10, FAILED)
    assert rounds.due(12) == Stamp(5, 20)
    rounds.told(0, 10, WHOLE)
    rounds.told(1, 10, WHOLE)
    assert rounds.safe is None
    rounds.told(0, 20, WHOLE)
    rounds.told(1, 20, WHOLE)
    assert rounds.safe == Stamp(5, 20)


@pytest.mark.parametrize(
    ("claims", "nodes", "places"),
    [
        ([Claim(), Claim()], 3, [0, 1]),
        ([Claim(4, 3, 2), Claim()], 3, [1, 0]),
        ([Claim(), Claim(4, 3, 1), Claim(4, 3, 2)], 3, [1, 2]),
        # What was in another ring, or had its place before another had it.
        ([Claim(4, 2, 1), Claim(4, 3, 1)], 3, [1, 0]),
        ([Claim(3, 2, 1), Claim(5, 2, 1)], 2, [1]),
        ([Claim()], 1, []),
    ],
)
def test_hosts_keep_their_places_and_others_take_what_is_free(
    claims: list[Claim], nodes: int, places: list[int]
) -> None:
    assert placed(claims, nodes) == places


@pytest.mark.parametrize(
    ("claims", "found"),
    [
        ([Claim(), Claim()], []),  # a job that begins
        ([Claim(2, 2, 0), Claim(2, 2, 1)], []),
        ([Claim(2, 2, 0), Claim()], [Gift(0, 1, True, True)]),
        ([Claim(), Claim(2, 2, 1)], [Gift(1, 0, True, True)]),  # the one that leads was lost
        # One that was elsewhere when life 2 ran.
        ([Claim(2, 2, 0), Claim(1, 2, 1)], [Gift(0, 1, True, True)]),
        ([Claim(2, 3, 0), Claim(2, 3, 1)], []),  # a host less: another ring
        (
            [Claim(2, 3, 0), Claim(), Claim(2, 3, 2)],
            [Gift(2, 1, True, False), Gift(0, 1, False, True)],
        ),
        # The copy of what 1 had went with 2, and that of 0 with 1.
        ([Claim(2, 4, 0), Claim(), Claim(), Claim(2, 4, 3)], [Gift(3, 2, True, False)]),
        ([], []),
    ],
)
def test_the_hosts_beside_a_lost_one_give_what_it_had(
    claims: list[Claim], found: list[Gift]
) -> None:
    assert gifts(claims) == found
