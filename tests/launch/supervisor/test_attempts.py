"""What follows an attempt, by the rules alone: who failed first, whether fewer ranks go on."""

from __future__ import annotations

import errno
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from fleetpipe.errors import ConfigError
from fleetpipe.job import attempt_files
from fleetpipe.job.attempt_files import INTERRUPTED, PREEMPTED, WHOLE_SIZE, Failure, how_to_go_on
from fleetpipe.launch.supervisor import attempts
from fleetpipe.launch.supervisor.attempts import (
    POISONED,
    Attempt,
    EndJob,
    KeptRanks,
    RankPositions,
    RestartJob,
    Verdict,
    decide_next,
    decide_with_all,
    decide_with_fewer,
    judge,
    with_interrupt,
)
from tests.fixtures import Patch

pytestmark = pytest.mark.no_paddle

DONE = Verdict(0)
SAVED = Verdict(0, saved=8)


def disk_full(step: int, error: str = "[Errno 28] No space left on device") -> Verdict:
    text = "rank 0 raised: CheckpointError: step 4 cannot be saved"
    details = f"CheckpointError: ..\n  got: {error}"
    return Verdict(1, step=step, culprit=text, details=details, raised=True)


def killed(step: int | None, how: str = "") -> Verdict:
    return Verdict(137, step=step, culprit=f"rank 1 died{how}")


def raised(step: int | None, text: str) -> Verdict:
    return Verdict(1, step=step, culprit=f"rank 0 raised: {text}", raised=True)


def permanent(step: int | None) -> Verdict:
    return replace(raised(step, "ConfigError: x"), permanent=True)


def through(*verdicts: Verdict, max_restart: int = 3) -> tuple[int, int, list[str]]:
    """Returns with which code a job ends, after how many attempts, and what is said."""
    attempt, said = Attempt(), []
    for verdict in verdicts:
        then = decide_next(attempt, verdict, max_restart)
        said += then.lines
        if isinstance(then, EndJob):
            return then.code, attempt.number, said
        attempt = then.attempt
    raise AssertionError(f"attempt {attempt.number} is to begin")


def test_what_the_terminal_has_is_not_said_again() -> None:
    error = "rank 0 raised: ValueError: bad\n  got: 3"
    verdict = Verdict(1, culprit=error, details="Traceback ..", raised=True)
    code, number, said = through(verdict, max_restart=0)
    assert (code, number, said[1:]) == (1, 1, ["all 0 restarts are used: the job has failed"])
    assert "got: 3\n    | Traceback .." in said[0]
    _, _, said = through(replace(verdict, shown=True), max_restart=0)
    assert said[0] == "attempt 1 ended: rank 0 raised: ValueError: bad"


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ([DONE], 0),
        ([killed(4), raised(9, "x"), DONE], 0),
        ([killed(4), raised(9, "x"), killed(None), killed(11)], 137),
        ([killed(4), killed(4)], POISONED),
        ([killed(4), killed(5), raised(5, "x")], POISONED),
        ([disk_full(4), disk_full(4)], 1),
        ([raised(None, "x"), raised(None, "x")], 1),
        ([raised(None, "x"), raised(None, "y"), killed(None), killed(None)], 137),
        ([permanent(None)], 1),
        ([killed(4), permanent(5)], 1),
        ([SAVED], PREEMPTED),
    ],
)
def test_how_attempts_end_decides_how_many_there_are(ends: list[Verdict], code: int) -> None:
    assert through(*ends)[:2] == (code, len(ends))


def unsaved(name: str) -> tuple[str, ...]:
    said = f"asked to stop by {name}, the job saved nothing: "
    said += "a script saves first where it goes by fleetpipe.resume, within --grace"
    return "attempt 1 ended in step 4: rank 1 died", said


@pytest.mark.parametrize(
    ("verdict", "stopped_by", "code", "said"),
    [
        (DONE, signal.SIGTERM, 0, ()),
        (SAVED, signal.SIGTERM, PREEMPTED, (how_to_go_on(False, 8),)),
        (killed(4), signal.SIGUSR1, 138, unsaved("SIGUSR1")),
        (killed(4), signal.SIGTERM, 143, unsaved("SIGTERM")),
        (DONE, signal.SIGINT, 0, ()),
        (SAVED, signal.SIGINT, INTERRUPTED, (how_to_go_on(True, 8),)),
        (killed(4), signal.SIGINT, INTERRUPTED, ("interrupted",)),
    ],
)
def test_a_job_that_is_asked_to_stop_is_not_started_again(
    verdict: Verdict, stopped_by: int, code: int, said: tuple[str, ...]
) -> None:
    assert decide_next(Attempt(), with_interrupt(verdict, stopped_by), 3, stopped_by) == EndJob(
        code, said
    )


def test_a_full_disk_is_not_the_fault_of_a_step() -> None:
    *_, said = through(disk_full(4), disk_full(4))
    assert "step 4 failed twice in a row" in said[-1]
    assert "what to do: free space on the disk" in said[-1]
    assert "data of this step" not in said[-1]
    limited = disk_full(4, "[Errno 27] File too large"), killed(4, " (was ended by SIGXFSZ)")
    for verdict in limited:
        code, _, said = through(verdict, verdict)
        assert code == verdict.code
        assert "what to do: raise the limit on the size of a file, which ulimit -f" in said[-1]


@pytest.mark.parametrize(
    ("done", "words"),
    [(None, ""), (0, " (no step ran)"), (1, " after 1 step"), (3, " after 3 steps")],
)
def test_a_script_that_counts_no_steps_is_told_how_many_ran(done: int | None, words: str) -> None:
    failure = replace(raised(None, "x"), done=done)
    _, attempts, said = through(failure, failure)
    assert attempts == 2
    assert said[0] == f"attempt 1 ended{words}: rank 0 raised: x"
    assert f"twice in a row with the same error{words}: it is not started again" in said[-1]


CARDS = "CUDA_VISIBLE_DEVICES"


def died(rank: int, step: int | None) -> Verdict:
    return Verdict(137, step=step, culprit=f"rank {rank} died", suspect=rank)


#: All ranks refuse their number, as the layers do not divide by it.
REFUSED = Verdict(1, culprit="rank 0 raised: PartitionError", raised=True, permanent=True)


def raised_on_rank_1(step: int) -> Verdict:
    return Verdict(1, step=step, culprit="rank 1 raised: ValueError: x", raised=True)


def kept(ranks: int = 4) -> KeptRanks:
    """What a pipeline of one stage a rank has kept."""
    return KeptRanks(7, ranks, (*range(ranks - 1, 0, -1),))


def followed(*verdicts: Verdict, least: int = 2, restarts: int = 3) -> EndJob | RestartJob:
    """What follows the last of some attempts."""
    then: EndJob | RestartJob = RestartJob(Attempt(), ())
    for verdict in verdicts:
        assert isinstance(then, RestartJob)
        attempt = then.attempt
        then = decide_with_fewer(
            attempt, verdict, decide_next(attempt, verdict, restarts), kept, least, 10.0
        )
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
    assert isinstance(then, RestartJob)
    assert then.attempt.positions.used == (places or ())
    assert ("from memory" in then.lines[-1]) is (places is not None)


@pytest.mark.parametrize(
    ("verdicts", "code", "said"),
    [
        ([raised_on_rank_1(7), raised_on_rank_1(7)], POISONED, "step 7 failed twice"),
        ([replace(died(1, 7), permanent=True)], 137, "no restart mends"),
        ([died(2, 7), died(2, 7), REFUSED, REFUSED], 1, "no restart mends"),
        # The step fails on other places too.
        ([died(2, 7), died(2, 7), died(1, 7), died(1, 7)], POISONED, "step 7 failed twice"),
        ([died(1, 7), died(2, 7)], POISONED, "step 7 failed twice"),
        ([died(0, 1), died(0, 1), died(0, 2), died(0, 2), died(0, 3), died(0, 3)], 65, "--least 2"),
    ],
)
def test_what_fails_anywhere_ends_the_job(verdicts: list[Verdict], code: int, said: str) -> None:
    then = followed(*verdicts)
    assert isinstance(then, EndJob)
    assert then.code == code
    assert any(said in line for line in then.lines)


def test_restarts_that_are_used_up_give_up_the_place_that_failed_last() -> None:
    then = followed(died(0, 1), died(1, 2), died(2, 3), died(3, 4))
    assert isinstance(then, RestartJob)
    assert then.attempt == Attempt(5, positions=RankPositions((0, 1, 2), (3,), 4, 3, 4, 10.0))


def test_a_place_is_tried_again_after_twice_the_time() -> None:
    then = followed(died(2, 7), died(2, 7))
    assert isinstance(then, RestartJob)
    assert then.lines[-1].endswith("after 7 steps, from memory, with 3 ranks of 4")
    wider = decide_with_all(then.attempt, 20).attempt
    assert (wider.number, wider.positions.used, wider.positions.lost) == (4, (), (2,))
    for number, seconds in ((2, 20.0), (1, 10.0)):
        verdict = died(number, 20)
        again = decide_with_fewer(
            wider, verdict, decide_next(wider, verdict, 3), lambda: kept(3), 2, 10.0
        )
        assert isinstance(again, RestartJob)
        # Another rank's failure is one to start again after.
        assert again.attempt.positions.used == ((0, 1, 3) if number == 2 else ())
        assert again.attempt.positions.seconds == seconds
    for verdict in (died(2, 30), died(2, None)):
        # All ranks have kept a step since: a later failure is one like any other.
        later = decide_with_fewer(wider, verdict, decide_next(wider, verdict, 3), kept, 2, 10.0)
        assert isinstance(later, RestartJob)
        assert later.attempt.positions == wider.positions
    second = Attempt(6, 1, died(2, 30), wider.positions)
    again = decide_with_fewer(second, died(2, None), decide_next(second, verdict, 3), kept, 2, 10.0)
    assert isinstance(again, RestartJob)
    assert again.attempt.positions[:3] == ((0, 1, 3), (2, 2), 4)


def test_nothing_is_given_up_before_a_step_was_kept() -> None:
    attempt = Attempt(2, 1, died(1, None))
    then = decide_next(attempt, died(1, None), 3)
    assert decide_with_fewer(attempt, died(1, None), then, lambda: None, 1, 10.0) is then


@pytest.mark.parametrize(
    ("here", "driver", "cards"),
    [
        ({CARDS: ""}, "/", None),
        ({CARDS: "4,5,6,7"}, "/", "4,7"),
        ({CARDS: "0"}, "/", "0"),
        ({}, "/", "0,3"),  # a host with a driver has a card for each position
        ({}, "/no driver", None),
    ],
)
def test_ranks_that_are_left_keep_their_cards(
    monkeypatch: Patch, here: dict[str, str], driver: str, cards: str | None
) -> None:
    monkeypatch.setattr(attempts, "_CARDS_DRIVER", driver)
    environment = RankPositions((0, 3), (1,), 4).environment(here)
    assert environment.pop(CARDS, None) == cards
    assert environment == {WHOLE_SIZE: "4"}
    assert RankPositions((), (1,), 4).environment(here) == {}


class Home:
    """A folder that ranks of an attempt have written into."""

    def __init__(self, path: Path, monkeypatch: Patch) -> None:
        self.path = path
        self.monkeypatch = monkeypatch
        monkeypatch.setenv(attempt_files.FOLDER, str(path))

    def rank(self, rank: int, **told: Failure | int) -> None:
        self.monkeypatch.setenv("PADDLE_TRAINER_ID", str(rank))
        for what, value in told.items():
            if isinstance(value, Failure):
                attempt_files.tell_failure(value)
            elif what == "code":
                attempt_files.tell_code(value)
            elif what == "step":
                attempt_files.step_counter()(value + 1)
            elif what == "done":
                attempt_files.step_counter(attempt_files.DONE)(value)
            elif what == "saved":
                attempt_files.tell_preempted(value)

    def ended(self, *rows: tuple[int, int]) -> None:
        for rank, code in rows:
            attempt_files.note_end(self.path, rank, code)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: Patch) -> Home:
    return Home(tmp_path, monkeypatch)


DIED = Failure(1, "died", "it ended without a goodbye; last heard .., at: operation F1.0")
RAISED = Failure(0, "raised", "MemoryError: 80 GiB", "Traceback\n  File\nMemoryError: 80 GiB")


def test_a_killed_rank_is_named_with_its_signal_and_the_place_that_others_know(home: Home) -> None:
    home.rank(0, step=7, failure=DIED, code=70)
    home.rank(1, step=7)
    home.ended((1, -9), (0, 70))
    words = f"rank 1 died (was ended by SIGKILL): {DIED.text}"
    assert judge(home.path, 137) == Verdict(
        137, step=7, culprit=words, suspect=1, died=frozenset([1])
    )


def test_the_exit_code_is_that_of_the_first_error(
    home: Home,
) -> None:
    home.rank(1, step=3, failure=replace(RAISED, rank=1), code=0)
    # It was replaced; a full disk is so for the next process too.
    home.ended((1, 1), (0, 70), (1, -15))
    assert judge(home.path, 143).code == 1


def test_a_rank_that_raised_is_named_with_the_end_of_its_traceback(home: Home) -> None:
    home.rank(0, step=3, failure=RAISED, code=1)
    home.rank(1, step=4, failure=RAISED, code=70)
    # The one that follows may be quicker to end, or be ended by the launcher.
    home.ended((1, -15), (0, 1))
    verdict = judge(home.path, 1)
    assert (verdict.code, verdict.step, verdict.raised) == (1, 3, True)
    assert verdict.culprit == "rank 0 raised: MemoryError: 80 GiB"
    assert verdict.details == RAISED.details
    assert not verdict.shown
    assert judge(home.path, 1, shown=0).shown


def test_a_folder_without_room_is_named_before_a_rank_writes(
    home: Home,
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    home.monkeypatch.setattr(os, "posix_fallocate", full)
    told = f"^{home.path.parent} has no room(?s:.*)expected: 1048576 bytes(?s:.*)bytes are free: "
    with pytest.raises(ConfigError, match=told):
        attempt_files.require_space(home.path)
    assert [*home.path.iterdir()] == []
    with pytest.raises(ConfigError, match="has no room"):
        home.rank(0, step=1)


def test_a_script_that_counts_no_steps_did_those_of_the_rank_that_came_furthest(home: Home) -> None:
    home.rank(0, failure=RAISED, code=1)
    home.ended((0, 1))
    assert (judge(home.path, 1).step, judge(home.path, 1).done) == (None, 0)
    home.rank(0, done=3)
    home.rank(1, done=4)
    assert judge(home.path, 1).done == 4
    home.rank(0, step=9)
    assert judge(home.path, 1).done is None


def test_an_error_that_no_restart_mends_is_one_on_whichever_rank_it_is_told(home: Home) -> None:
    wrong = Failure.of(1, ConfigError("pp_degree 3 does not divide 4 ranks"))
    home.rank(0, failure=wrong, code=70)
    home.ended((0, 70), (1, 1))
    assert judge(home.path, 1).permanent


def test_a_rank_that_nobody_knew_yet_is_named_by_the_launcher_alone(home: Home) -> None:
    lost = Failure(1, "raised", "PeerFailed: rank 0, which serves the job's store, is gone")
    home.rank(1, failure=lost, code=70)
    home.ended((0, -11), (1, 70))
    verdict = judge(home.path, 139)
    assert (verdict.code, verdict.step) == (139, None)
    assert verdict.culprit == "rank 0 was ended by SIGSEGV without a word"
    assert judge(home.path, 0).culprit == ""


def test_the_start_repeats_only_with_the_same_error_in_the_same_line() -> None:
    place = 'Traceback\n  File "train.py", line 3, in <module>\nKeyError: '
    first = Verdict(1, culprit="rank 0 raised: KeyError: at 10:31", details=place, raised=True)
    again = Verdict(1, culprit="rank 1 raised: KeyError: at 10:32", details=place, raised=True)
    assert again.repeats(first)
    assert not replace(again, details=place.replace("line 3", "line 4")).repeats(first)


@pytest.mark.parametrize(
    ("step", "others", "place"), [(None, False, 0), (None, True, None), (7, False, None)]
)
def test_a_place_is_at_fault_where_its_rank_alone_fails_before_the_first_step(
    home: Home, step: int | None, others: bool, place: int | None
) -> None:
    home.rank(0, failure=RAISED, **({} if step is None else {"step": step}))
    home.rank(1, failure=replace(RAISED, rank=int(others)))
    home.ended((0, 1), (1, 1))
    assert judge(home.path, 1).suspect == place


def test_the_place_of_a_rank_that_hangs_is_at_fault_not_that_of_one_that_waited(home: Home) -> None:
    home.rank(0, step=7, failure=replace(RAISED, rank=0, what="timed out"))
    home.ended((0, 70), (1, -9))
    assert judge(home.path, 1).suspect == 1
