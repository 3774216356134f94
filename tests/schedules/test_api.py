from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

from fleetpipe.schedules import (
    Action,
    Placement,
    Plan,
    Schedule,
    build,
    forward_only,
    names,
)
from fleetpipe.schedules.rows import ScheduleRows


@pytest.mark.parametrize("name", names())
def test_what_is_handed_out_can_do_everything(name: str) -> None:
    schedule = build(name, ranks=2, micro_batches=3)
    plan = schedule.lower()
    assert type(schedule) is type(plan.schedule) is type(Schedule.parse(str(schedule))) is Schedule
    assert type(plan) is type(Plan.parse(str(plan))) is Plan
    assert plan.schedule == schedule
    assert plan.schedule.lower() == plan


def test_forwards_alone_are_a_schedule_too() -> None:
    assert type(forward_only(Placement("loop", 2), 3)) is Schedule


def test_values_stay_what_they_are_when_copied_and_sent() -> None:
    schedule = build("ZBV", ranks=2, micro_batches=3)
    plan = schedule.lower()
    plan.verify()
    assert plan.order
    for value in (schedule, plan):
        for again in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value)):
            assert type(again) is type(value)
            assert (again, hash(again), str(again)) == (value, hash(value), str(value))
    renamed = dataclasses.replace(schedule, name="Other")
    assert type(renamed) is Schedule
    assert renamed != schedule
    renamed.verify()


def test_a_long_schedule_has_a_short_repr() -> None:
    schedule = build("ZBV", ranks=2, micro_batches=50)
    assert repr(schedule) == "<Schedule ZBV: 2 ranks, 50 micro-batches, 2 chunks, vee>"
    assert repr(schedule.lower()) == "<Plan ZBV: 2 ranks, 50 micro-batches, 1204 ops>"


def test_rows_become_a_schedule() -> None:
    rows = ScheduleRows("Mine", Placement("loop", 1), 1, ((Action("F", 0, 0), Action("B", 0, 0)),))
    schedule = Schedule.of(rows)
    schedule.verify()
    assert schedule.actions == rows.actions
