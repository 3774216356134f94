"""What is put together from records: states, ages, the time that is left, and files of it."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fleetpipe.contrib.view.reading.board import (
    FILE,
    Boards,
    Heard,
    JobBoard,
    LastCheckpoint,
    board_of,
    read_board,
)
from fleetpipe.errors import ConfigError
from fleetpipe.job.records import RankRecord, StepRow
from tests.contrib.view.boards import board

pytestmark = pytest.mark.no_paddle

RECORD = RankRecord(
    rank=0,
    action="operation F0.1",
    stages=(0, 2),
    step=8,
    steps=20,
    step_age=0.5,
    step_time=0.25,
    busy=0.75,
    samples=32,
    memory=1000,
    memory_limit=4000,
    held=2,
    held_cap=4,
    gradient_norm=1.5,
    saved=5,
    saved_age=2.0,
    rows=(StepRow(7, 0.25, 0.125, 0.2, 0.01, 0.0, 0.05, (1.0, -12.75, 3.0), 5.125e-6),),
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
        board_of(json.dumps({"at": 1, "ranks": [{"rank": 0, "action": "", "state": 1}]}))


def test_the_state_of_each_rank() -> None:
    others = {
        1: Heard(RankRecord(1, "", step_age=0.1, awaited=0, step=9, step_time=0.75)),
        2: Heard(RankRecord(2, "", step_age=1.0, step=9), silence=0.75),
        3: Heard(RankRecord(3, "")),
        4: Heard(RankRecord(4, "", step_age=0.1), left=True),
    }
    made = Boards().next({0: Heard(RECORD), **others}, 100.0)
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
    status = board().status()
    assert status == {
        "step": 11,
        "steps": 100,
        "step_time": 0.5,
        "samples_per_second": 64.0,
        "eta_seconds": 44.5,
        "ranks": [
            {
                "rank": 0,
                "stage": 0,
                "state": "running",
                "busy": 0.75,
                "memory": 3_000_000,
                "last_step_age": 0.25,
            },
            {
                "rank": 1,
                "stage": 1,
                "state": "stopped",
                "busy": 0.5,
                "memory": 5_000_000,
                "last_step_age": 4.0,
            },
        ],
        "slow": [{"rank": 0, "what": "compute", "factor": 1.5}],
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
    assert late.news == "nothing was heard of the job for 8.0 s"
    assert late.last_checkpoint is not None
    assert late.last_checkpoint.age == pytest.approx(11.5)
    # What is not heard of has neither a rate nor an end.
    assert whole.eta_seconds is not None
    assert (late.eta_seconds, late.samples_per_second) == (None, 0.0)
    ended = replace(whole, ranks=tuple(replace(rank, state="ended") for rank in whole.ranks))
    assert ended.eta_seconds is None
    assert replace(ended, step=100).seen_at(now + 8).eta_seconds == 0.0
