"""The history of a job: every step's figures in bounded memory, with gaps where none are known."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from fleetpipe.contrib.view.reading import history
from fleetpipe.contrib.view.reading.history import (
    MOST,
    MOST_EVENTS,
    History,
    HistoryRow,
    RunEvent,
    read_history,
)

pytestmark = pytest.mark.no_paddle


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
