"""What is put together from records: the board of a job, and the history of its steps."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fleetpipe.contrib.view import history
from fleetpipe.contrib.view.board import (
    FILE,
    BoardFile,
    Boards,
    JobBoard,
    LastCheckpoint,
    parse_board,
    read_board,
)
from fleetpipe.contrib.view.history import (
    MOST,
    MOST_EVENTS,
    History,
    HistoryRow,
    RunEvent,
    read_history,
)
from fleetpipe.errors import ConfigError
from fleetpipe.job.records import PARTS, LastRecord, RankRecord, RunProgress, StepRow
from tests.contrib.view.job_records import board, running, written_on

pytestmark = pytest.mark.no_paddle

ROW = StepRow(7, 0.25, 0.125, 0.2, 0.01, 0.0, 0.05, (1.0, -12.75, 3.0), 5.125e-6)
RECORD = replace(
    RankRecord(0, "operation F0.1", (0, 2), step=8, steps=20, step_age=0.5, step_time=0.25),
    busy=0.75,
    samples=32,
    memory=1000,
    memory_limit=4000,
    rows=(ROW,),
    held=2,
    held_cap=4,
    gradient_norm=1.5,
    saved=5,
    saved_age=2.0,
)


def test_a_record_is_read_as_it_was_written() -> None:
    assert RankRecord.of(json.loads(json.dumps(RECORD.content()))) == RECORD
    assert RECORD.lean.rows == ()
    content = json.loads(json.dumps(RECORD.content()).replace("-12.75", "NaN"))
    with pytest.raises(ConfigError, match=r"where: rows\[0\]\[7\]"):
        RankRecord.of(content)


def test_a_board_is_read_as_it_was_written(tmp_path: Path) -> None:
    whole = board()
    (tmp_path / FILE).write_text(json.dumps(whole.content()))
    assert read_board(tmp_path / FILE) == whole
    with pytest.raises(ConfigError, match=r"where: ranks\[0\].state"):
        parse_board(json.dumps({"at": 1, "ranks": [{"rank": 0, "action": "", "state": 1}]}))


def test_the_state_of_each_rank() -> None:
    others = {
        1: LastRecord(RankRecord(1, "", step_age=0.1, awaited=0, step=9, step_time=0.75)),
        2: LastRecord(RankRecord(2, "", step_age=1.0, step=9), silence=0.75),
        3: LastRecord(RankRecord(3, "")),
        4: LastRecord(RankRecord(4, "", step_age=0.1), left=True),
    }
    made = Boards().next_board({0: LastRecord(RECORD), **others}, 100.0)
    states = [(rank.rank, rank.stage, rank.state, rank.step_age) for rank in made.ranks]
    assert states == [
        (0, 0, "running", 0.5),
        (1, None, "waiting", 0.1),
        (2, None, "stopped", 1.75),
        (3, None, "starting", None),
        (4, None, "ended", 0.1),
    ]
    assert (made.step, made.steps, made.step_time) == (0, 20, 0.5)
    assert (made.ranks[0].held, made.ranks[0].held_cap, made.gradient_norm) == (2, 4, 1.5)
    assert (made.samples_per_second, made.eta_seconds) == (64.0, 10.0)
    assert made.last_checkpoint == LastCheckpoint(5, 2.0)


def test_scripts_get_fixed_keys() -> None:
    of_rank = ("rank", "stage", "state", "busy", "memory", "last_step_age")
    ranks = [(0, 0, "running", 0.75, 3_000_000, 0.25), (1, 1, "stopped", 0.5, 5_000_000, 4.0)]
    assert board().status() == {
        "state": "stopped",
        "step": 11,
        "steps": 100,
        "step_time": 0.5,
        "samples_per_second": 64.0,
        "eta_seconds": 44.5,
        "shares": {},
        "ranks": [dict(zip(of_rank, values)) for values in ranks],
        "slow": [{"rank": 0, "what": "compute", "factor": 1.5, "since": 0}],
        "restarts": 2,
        "last_checkpoint": {"step": 10, "age": 3.5},
    }
    assert JobBoard(0.0).status()["eta_seconds"] is None


def test_a_board_of_which_nothing_more_is_heard_ages() -> None:
    now = time.time()
    whole = board(at=now)
    assert whole.seen_at(now + 0.3) is whole
    late = whole.seen_at(now + 8)
    assert [rank.state for rank in late.ranks] == ["stopped", "stopped"]
    assert [rank.step_age for rank in late.ranks] == pytest.approx([8.25, 12.0])
    assert (late.state, late.silence) == ("stopped", 8.0)
    assert late.last_checkpoint is not None
    assert late.last_checkpoint.age == pytest.approx(11.5)
    # What is not heard of has neither a rate nor an end.
    assert whole.eta_seconds is not None
    assert (late.eta_seconds, late.samples_per_second) == (None, 0.0)
    ended = replace(whole, ranks=tuple(replace(rank, state="ended") for rank in whole.ranks))
    assert ended.eta_seconds is None
    assert replace(ended, step=100).seen_at(now + 8).eta_seconds == 0.0


SPENT = (2.0, 0.5, 1.0, 0.25, 0.0, 0.25, 0.0)


def test_the_shares_of_wall_time_are_those_of_a_mean_rank() -> None:
    one, two = (replace(RECORD, rank=n, rows=()) for n in (0, 1))
    made = board(ranks=(replace(one, spent=SPENT), replace(two, spent=(0.0, *SPENT[:-1]))))
    expected = (0.25, 0.3125, 0.1875, 0.15625, *[0.03125] * 3)
    assert made.status()["shares"] == pytest.approx(dict(zip(PARTS, expected)))


@pytest.mark.parametrize(("age", "state"), [(1.0, "running"), (1.6, "late")])
def test_a_job_without_a_step_for_three_usual_ones_is_late(age: float, state: str) -> None:
    """Its board is written on, but has neither a rate nor an end; who keeps the others is named."""
    first, second = running().ranks
    ranks = (
        replace(first, state="waiting", awaited=1, step_age=age),
        replace(second, step_age=age, part="data"),
    )
    seen = running(ranks=ranks, usual_step=0.5, slow=()).after(0.0)
    assert seen.state == seen.status()["state"] == state
    if state == "running":
        assert (seen.step_time, seen.eta_seconds, seen.slow) == (0.5, 44.5, ())
    else:
        assert (seen.step_time, seen.samples_per_second, seen.eta_seconds) == (0.0, 0.0, None)
        assert [str(one) for one in seen.slow] == [
            "rank 1 is slow: data takes 3.2 times as long as a usual step; "
            "likely its loader: give it more workers, or a faster disk"
        ]


def test_nobody_is_slow_while_all_evaluate() -> None:
    first, second = running().ranks
    ranks = (
        replace(first, state="waiting", awaited=1, step_age=9.0, part="evaluation"),
        replace(second, step_age=9.0, part="evaluation"),
    )
    seen = running(ranks=ranks, slow=()).after(0.0)
    assert (seen.state, seen.slow) == ("late", ())


@pytest.mark.parametrize("ahead", [-3600.0, 0.0, 3600.0])
def test_a_board_that_does_not_change_is_dead_whatever_the_clocks_say(
    tmp_path: Path, ahead: float
) -> None:
    with written_on(tmp_path, running(), ahead):
        assert BoardFile(tmp_path / FILE)().state == "running"
    dead = BoardFile(tmp_path / FILE)()
    assert (dead.state, dead.eta_seconds, dead.samples_per_second) == ("stopped", None, 0.0)
    assert dead.silence >= (3600.0 if ahead < 0 else 0.6)
    ended = replace(running(), ranks=tuple(replace(r, state="ended") for r in running().ranks))
    with written_on(tmp_path, ended, ahead):
        pass
    assert BoardFile(tmp_path / FILE)().state == "ended"


def test_a_board_that_is_read_again_dies_when_it_stays(tmp_path: Path) -> None:
    with written_on(tmp_path, running()):
        source = BoardFile(tmp_path / FILE)
        assert source().state == "running"
    source()
    time.sleep(0.7)
    assert source().state == "stopped"


def test_a_norm_that_is_no_number_is_one_on_the_board(tmp_path: Path) -> None:
    progress = RunProgress()
    progress.gradient_norm = lambda: math.nan
    record = RankRecord.of(json.loads(json.dumps(progress.record(0, "", True).content())))
    made = Boards().next_board({0: LastRecord(record)}, 100.0)
    (tmp_path / FILE).write_text(json.dumps(made.content()))
    assert math.isnan(read_board(tmp_path / FILE).gradient_norm or 0.0)


def of_steps(steps: int, first: int = 1) -> History:
    made = History()
    for step in range(first, steps + 1):
        made.add(step, {"loss": 1.0 / step})
    return made


@pytest.mark.parametrize("steps", [1, MOST, MOST + 1, 10 * MOST + 7])
def test_all_of_a_run_in_a_bounded_number_of_rows(steps: int) -> None:
    made = of_steps(steps)
    xs, ys = made.series()["loss"]
    assert MOST // 2 < len(xs) <= MOST or len(xs) == steps
    assert (xs[0], xs[-1], ys) == (made.stride, steps, [1.0 / x for x in xs])


def test_what_is_no_number_stays_when_rows_are_joined_and_evaluations_do() -> None:
    made = of_steps(100)
    made.add(100, {"loss": math.nan, "eval_loss": 0.5})
    for step in range(101, 8 * MOST):
        made.add(step, {"loss": 1.0})
    series = made.series()
    assert [x - made.stride < 100 <= x for x, y in zip(*series["loss"]) if math.isnan(y)] == [True]
    assert [(x >= 100, y) for x, y in zip(*series["eval_loss"])] == [(True, 0.5)]


def test_a_run_that_goes_on_from_a_checkpoint_and_one_whose_steps_are_unknown() -> None:
    made = of_steps(20)
    made.add(11, {"loss": 7.0})
    assert made.series()["loss"][1][9:] == [0.1, 7.0]
    made.add(15, {"loss": 8.0})
    xs, ys = made.series()["loss"]
    assert xs[-3:] == [11, 12, 15]
    assert math.isnan(ys[-2])
    again = of_steps(5 * MOST)
    again.add(1, {"loss": 3.0})
    assert (again.stride, again.rows()) == (1, [HistoryRow(1, {"loss": 3.0})])


def test_it_is_read_as_it_was_written_and_a_damaged_one_is_none(tmp_path: Path) -> None:
    made = of_steps(3 * MOST)
    made.add(made.last + 1, {"loss": math.inf})
    made.add_event(RunEvent(1.7e9, 3, "warning", "slow disk", 3))
    file = tmp_path / history.FILE
    file.write_text(json.dumps(made.content()))
    read = read_history(tmp_path)
    assert (read.stride, read.last) == (made.stride, made.last)
    assert (read.rows(), read.events) == (made.rows(), made.events)
    file.write_text('{"stride": 0, "rows": [[1, {"loss": "x"}]]}')
    assert read_history(tmp_path).rows() == []


def test_events_are_bounded_and_one_that_comes_again_is_counted() -> None:
    made = History()
    for step in (10, 20, 30):
        made.add_event(RunEvent(1e9 + step, step, "save", "saved", step))
    assert made.events == (RunEvent(1e9 + 30, 30, "save", "saved", 10, 3),)
    assert str(made.events[0]) == "steps 10 to 30: saved, 3 times"
    for step in range(2 * MOST_EVENTS):
        made.add_event(RunEvent(1e9, step, "warning", f"warning {step}", step))
    assert len(made.events) == MOST_EVENTS
    assert str(made.events[-1]) == f"step {2 * MOST_EVENTS - 1}: warning {2 * MOST_EVENTS - 1}"
