"""Who is said to have failed first, of what the ranks and the launcher left in its folder."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from fleetpipe.errors import ConfigError
from fleetpipe.job import attempt_files
from fleetpipe.job.watching.failure import Failure
from fleetpipe.launch.supervisor.attempts import Verdict, judge


class Home:
    """A folder that ranks of an attempt have written into."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
                attempt_files.page()(value + 1)
            elif what == "done":
                attempt_files.page(attempt_files.DONE)(value)
            elif what == "saved":
                attempt_files.tell_preempted(value)

    def ended(self, *rows: tuple[int, int]) -> None:
        for rank, code in rows:
            attempt_files.note_end(self.path, rank, code)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    return Home(tmp_path, monkeypatch)


DIED = Failure(1, "died", "it ended without a goodbye; last heard .., at: operation F1.0")
RAISED = Failure(0, "raised", "MemoryError: 80 GiB", "Traceback\n  File\nMemoryError: 80 GiB")


def test_a_killed_rank_is_named_with_its_signal_and_the_place_that_others_know(home: Home) -> None:
    home.rank(0, step=7, failure=DIED, code=70)
    home.rank(1, step=7)
    home.ended((1, -9), (0, 70))
    words = f"rank 1 died (was ended by SIGKILL): {DIED.text}"
    assert judge(home.path, 137) == Verdict(
        137, step=7, culprit=words, place=1, died=frozenset([1])
    )


def test_the_code_is_that_of_the_error_and_not_of_how_the_launcher_ended_the_next(
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


def test_a_folder_without_room_for_what_ranks_tell_is_named_before_a_rank_writes(
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


def test_nothing_is_made_up_where_nothing_is_known(home: Home) -> None:
    assert judge(home.path, 4).culprit == "Paddle's launcher ended with 4"


def test_a_life_that_was_asked_to_end_has_saved(home: Home) -> None:
    home.rank(0, step=9, saved=9, code=0)
    home.ended((0, 0))
    assert judge(home.path, 0) == Verdict(0, saved=9)


def test_the_same_step_repeats_whoever_failed_and_the_start_only_with_the_same_error() -> None:
    killed = Verdict(137, step=5, culprit="rank 1 died")
    assert Verdict(1, step=5, culprit="rank 0 raised: x", raised=True).repeats(killed)
    assert not Verdict(137, step=6, culprit="rank 1 died").repeats(killed)
    assert not Verdict(137, culprit="rank 1 died").repeats(killed)
    start = Verdict(1, culprit="rank 0 raised: x", raised=True)
    assert start.repeats(start)
    assert not Verdict(1, culprit="rank 0 raised: y", raised=True).repeats(start)
    place = 'Traceback\n  File "train.py", line 3, in <module>\nKeyError: '
    first = Verdict(1, culprit="rank 0 raised: KeyError: at 10:31", details=place, raised=True)
    again = Verdict(1, culprit="rank 1 raised: KeyError: at 10:32", details=place, raised=True)
    assert again.repeats(first)
    assert not replace(again, details=place.replace("line 3", "line 4")).repeats(first)
    lost = Verdict(137, culprit="rank 0 was ended by SIGKILL without a word")
    assert not lost.repeats(lost)


@pytest.mark.parametrize(
    ("step", "others", "place"), [(None, False, 0), (None, True, None), (7, False, None)]
)
def test_a_place_is_at_fault_where_its_rank_alone_fails_before_the_first_step(
    home: Home, step: int | None, others: bool, place: int | None
) -> None:
    home.rank(0, failure=RAISED, **({} if step is None else {"step": step}))
    home.rank(1, failure=replace(RAISED, rank=int(others)))
    home.ended((0, 1), (1, 1))
    assert judge(home.path, 1).place == place


def test_the_place_of_a_rank_that_hangs_is_at_fault_not_that_of_one_that_waited(home: Home) -> None:
    home.rank(0, step=7, failure=replace(RAISED, rank=0, what="timed out"))
    home.ended((0, 70), (1, -9))
    assert judge(home.path, 1).place == 1
