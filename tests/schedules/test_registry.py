from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpipe.errors import ConfigError
from fleetpipe.schedules import (
    Action,
    Placement,
    Plan,
    Schedule,
    build,
    canonical_name,
    forward_only,
    names,
    rebuild,
)
from fleetpipe.schedules.rows import ScheduleRows
from tests.schedules.declared import bubble, peaks, takes
from tests.schedules.helpers import assert_forms_agree

pytestmark = pytest.mark.no_paddle

NAMES = (
    *("FThenB", "1F1B", "Eager1F1B", "kFkB", "Interleaved1F1B"),
    *("ZBH1", "ZBH2", "ZBV", "VHalf", "VMin", "DualPipeV"),
)


@given(st.sampled_from(NAMES), st.integers(1, 7), st.integers(1, 3), st.integers(1, 16))
def test_every_schedule_keeps_what_it_declares_or_is_refused(
    name: str, p: int, v: int, m: int
) -> None:
    if not takes(name, v):
        with pytest.raises(ConfigError, match=rf"{v} chunks on a rank|exactly two chunks"):
            build(name, ranks=p, micro_batches=m, chunks=v)
        return
    schedule = build(name, ranks=p, micro_batches=m, chunks=v)
    most = peaks(name, p, v, m)
    schedule.verify(memory_cap=max(most))
    timeline = schedule.simulate()
    assert all(peak <= limit for peak, limit in zip(timeline.peak_activations, most))
    limit, exact = bubble(name, p, v, m)
    assert timeline.bubble <= limit
    assert not exact or timeline.bubble == limit
    assert_forms_agree(schedule)


@pytest.mark.parametrize("name", NAMES)
def test_the_declared_peak_is_reached(name: str) -> None:
    schedule = build(name, ranks=4, micro_batches=12)
    v = schedule.placement.chunks
    assert list(schedule.simulate().peak_activations) == peaks(name, 4, v, 12)


@pytest.mark.parametrize("name", ["FThenB", "1F1B", "Eager1F1B"])
@pytest.mark.parametrize("m", [1, 5, 16])
def test_whole_backwards_end_together(name: str, m: int) -> None:
    timeline = build(name, ranks=5, micro_batches=m).simulate()
    assert timeline.makespan == timeline.span == 3 * (m + 4)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("fthenb", "FThenB"),
        ("F-then-B", "FThenB"),
        ("f then b", "FThenB"),
        ("GPipe", "FThenB"),
        ("afab", "FThenB"),
        ("1f1b", "1F1B"),
        ("1_F-1 B", "1F1B"),
        ("EAGER_1F1B", "Eager1F1B"),
        ("vpp", "Interleaved1F1B"),
        ("zb-h1", "ZBH1"),
        ("interleaved zero bubble", "ZBH1"),
        ("ZBVPP", "ZBV"),
        ("v-min", "VMin"),
        ("Dual Pipe V", "DualPipeV"),
        ("Schedule1F1B", "1F1B"),
        ("ScheduleGPipe", "FThenB"),
        ("ScheduleZBVZeroBubble", "ZBV"),
    ],
)
def test_spelling_does_not_count(spelling: str, name: str) -> None:
    assert canonical_name(spelling) == name
    assert build(spelling, ranks=2, micro_batches=2).name == name


@pytest.mark.parametrize(
    ("name", "nearest"), [("1F1", "'1F1B'"), ("ZBH3", "'ZBH1'"), ("", "known: ")]
)
def test_a_name_that_is_not_built_is_refused_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(name, ranks=2, micro_batches=2)
    assert repr(name) in str(error.value)
    assert nearest in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 0, "micro_batches": 2}, "ranks=0"),
        ({"ranks": 2, "micro_batches": 0}, "micro_batches=0"),
        ({"ranks": 2, "micro_batches": 2.0}, "micro_batches=2.0"),
        ({"ranks": 2, "micro_batches": 2, "chunks": 0}, "chunks=0"),
        ({"ranks": 2, "micro_batches": 2, "chunks": 2}, "Eager1F1B cannot place 2 chunks"),
        ({"ranks": 2, "micro_batches": 2, "slack": 2}, "Eager1F1B has no option 'slack'"),
    ],
)
def test_what_a_schedule_does_not_take_is_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build("Eager1F1B", **arguments)


def test_names_are_those_of_the_table() -> None:
    assert tuple(name for name in names() if name != "auto") == (*NAMES, "Seq1F1B", "Hanayo")


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("1F1B", {}, ()),
        ("kFkB", {"groups": [4]}, (("groups", (4,)),)),
        ("VPP", {"warmup_slack": 1, "groups": None}, (("warmup_slack", 1),)),
        ("VPP", {"warmup_slack": 2}, ()),
        ("Seq1F1B", {"slices": 3}, ()),
        ("auto", {"memory_cap": 3, "placed": "loop"}, (("memory_cap", 3), ("placed", "loop"))),
        ("auto", {"slices": 4}, (("slices", 4),)),
    ],
)
def test_a_schedule_carries_its_options_through_text_plan_and_rebuilding(
    name: str, given: dict[str, object], kept: tuple[tuple[str, object], ...]
) -> None:
    schedule = build(name, ranks=3, micro_batches=6, **given)
    assert schedule.options == kept
    assert Schedule.parse(str(schedule)) == schedule
    plan = schedule.lower()
    assert Plan.parse(str(plan)).schedule.options == kept
    for count in (2, 6, 9):
        again = build(name, ranks=3, micro_batches=count, **given)
        assert rebuild(Schedule.parse(str(schedule)), count) == again


def test_options_that_fit_one_number_of_micro_batches_are_not_bent_to_another() -> None:
    schedule = build("VPP", ranks=2, micro_batches=6, groups=[4, 2])
    assert rebuild(schedule, 6) == schedule
    with pytest.raises(ConfigError, match="sizes with the sum 8"):
        rebuild(schedule, 8)
    with pytest.raises(ConfigError, match="no schedule 'Mine'"):
        rebuild(Schedule("Mine", schedule.placement, 6, schedule.actions), 8)


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
