"""When a job goes on with fewer ranks, by the rules alone: no process, no clock, no Paddle."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleetpipe.job.attempt_files import WHOLE_SIZE
from fleetpipe.launch.supervisor import width
from fleetpipe.launch.supervisor.attempts import POISONED, Again, Attempt, End, Verdict, after
from fleetpipe.launch.supervisor.narrowing import KeptRanks, with_all, with_fewer
from fleetpipe.launch.supervisor.width import Width

CARDS = "CUDA_VISIBLE_DEVICES"


def died(rank: int, step: int | None) -> Verdict:
    return Verdict(137, step=step, culprit=f"rank {rank} died", place=rank)


#: All ranks refuse their number, as the layers do not divide by it.
REFUSED = Verdict(1, culprit="rank 0 raised: PartitionError", raised=True, permanent=True)


def raised(step: int) -> Verdict:
    return Verdict(1, step=step, culprit="rank 1 raised: ValueError: x", raised=True)


def kept(ranks: int = 4) -> KeptRanks:
    """What a pipeline of one stage a rank has kept."""
    return KeptRanks(7, ranks, (*range(ranks - 1, 0, -1),))


def followed(*verdicts: Verdict, least: int = 2, restarts: int = 3) -> End | Again:
    """What follows the last of some attempts."""
    then: End | Again = Again(Attempt(), ())
    for verdict in verdicts:
        assert isinstance(then, Again)
        attempt = then.attempt
        then = with_fewer(attempt, verdict, after(attempt, verdict, restarts), kept, least, 10.0)
    return then


@pytest.mark.parametrize(
    ("verdicts", "places"),
    [
        ([died(2, 7)], None),
        ([died(2, 7), died(2, 7)], (0, 1, 3)),
        ([died(2, 7), died(2, None)], (0, 1, 3)),
        ([died(2, 7), died(2, 8)], None),
        ([died(2, 7), died(1, 8)], None),
        ([died(2, 7), died(2, 7), died(2, 9), died(2, 9)], (0, 1)),
        ([died(2, 7), died(2, 7), died(2, None), died(2, None)], (0, 1)),
        ([died(2, 7), died(2, 7), REFUSED], (0, 1)),
        ([replace(died(3, 7), died=frozenset([2, 3])), died(2, 7)], (0, 1, 3)),
        ([died(0, 7), died(0, 7), died(0, 9), died(0, 9)], (2, 3)),
    ],
)
def test_a_place_is_given_up_when_its_rank_fails_twice_without_a_step_between(
    verdicts: list[Verdict], places: tuple[int, ...] | None
) -> None:
    then = followed(*verdicts)
    assert isinstance(then, Again)
    assert then.attempt.width.places == (places or ())
    assert ("from memory" in then.said[-1]) is (places is not None)


@pytest.mark.parametrize(
    ("verdicts", "code", "said"),
    [
        ([raised(7), raised(7)], POISONED, "step 7 failed twice"),
        ([replace(died(1, 7), permanent=True)], 137, "no restart mends"),
        ([died(2, 7), died(2, 7), REFUSED, REFUSED], 1, "no restart mends"),
        # The step fails on other places too.
        ([died(2, 7), died(2, 7), died(1, 7), died(1, 7)], POISONED, "step 7 failed twice"),
        ([died(1, 7), died(2, 7)], POISONED, "step 7 failed twice"),
        ([died(0, 1), died(0, 1), died(0, 2), died(0, 2), died(0, 3), died(0, 3)], 65, "--least 2"),
    ],
)
def test_what_fails_on_any_place_ends_the_job(
    verdicts: list[Verdict], code: int, said: str
) -> None:
    then = followed(*verdicts)
    assert isinstance(then, End)
    assert then.code == code
    assert any(said in line for line in then.said)


def test_restarts_that_are_used_up_give_up_the_place_that_failed_last() -> None:
    then = followed(died(0, 1), died(1, 2), died(2, 3), died(3, 4))
    assert isinstance(then, Again)
    assert then.attempt == Attempt(5, width=Width((0, 1, 2), (3,), 4, 3, 4, 10.0))


def test_a_place_is_tried_again_after_twice_the_time() -> None:
    then = followed(died(2, 7), died(2, 7))
    assert isinstance(then, Again)
    assert then.said[-1].endswith("after 7 steps, from memory, with 3 ranks of 4")
    wider = with_all(then.attempt, 20).attempt
    assert (wider.number, wider.width.places, wider.width.lost) == (4, (), (2,))
    for number, seconds in ((2, 20.0), (1, 10.0)):
        verdict = died(number, 20)
        again = with_fewer(wider, verdict, after(wider, verdict, 3), lambda: kept(3), 2, 10.0)
        assert isinstance(again, Again)
        # Another rank's failure is one to start again after.
        assert again.attempt.width.places == ((0, 1, 3) if number == 2 else ())
        assert again.attempt.width.seconds == seconds
    for verdict in (died(2, 30), died(2, None)):
        # All ranks have kept a step since: a later failure is one like any other.
        later = with_fewer(wider, verdict, after(wider, verdict, 3), kept, 2, 10.0)
        assert isinstance(later, Again)
        assert later.attempt.width == wider.width
    second = Attempt(6, 1, died(2, 30), wider.width)
    again = with_fewer(second, died(2, None), after(second, verdict, 3), kept, 2, 10.0)
    assert isinstance(again, Again)
    assert again.attempt.width[:3] == ((0, 1, 3), (2, 2), 4)


def test_nothing_is_given_up_before_a_step_was_kept() -> None:
    attempt = Attempt(2, 1, died(1, None))
    then = after(attempt, died(1, None), 3)
    assert with_fewer(attempt, died(1, None), then, lambda: None, 1, 10.0) is then


@pytest.mark.parametrize(
    ("here", "cards"),
    [({CARDS: ""}, None), ({CARDS: "4,5,6,7"}, "4,7"), ({CARDS: "0"}, "0")],
)
def test_ranks_that_are_left_keep_their_cards(here: dict[str, str], cards: str | None) -> None:
    environment = Width((0, 3), (1,), 4).environment(here)
    assert environment.pop(CARDS, None) == cards
    assert environment == {WHOLE_SIZE: "4"}
    assert Width((), (1,), 4).environment(here) == {}


@pytest.mark.parametrize(("driver", "cards"), [("/", "0,3"), ("/no driver", None)])
def test_where_no_variable_names_cards_a_host_with_a_driver_has_one_for_each_place(
    monkeypatch: pytest.MonkeyPatch, driver: str, cards: str | None
) -> None:
    monkeypatch.setattr(width, "_CARDS_DRIVER", driver)
    assert Width((0, 3), (1,), 4).environment({}).get(CARDS) == cards
