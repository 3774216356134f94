"""1F1B whose micro-batches are slices of sequences, and schedules with parts before the loss."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpipe.errors import ConfigError, ScheduleError
from fleetpipe.schedules import Action, Costs, Plan, Schedule, build, forward_only, rebuild, render
from fleetpipe.schedules.action import SliceNumber
from fleetpipe.schedules.families import table
from tests.schedules.sample_schedules import assert_forms_agree

pytestmark = pytest.mark.no_paddle

HEADER = "# fleetpipe-schedule 1 name=A ranks=1 micro_batches=1 chunks=1 placement=loop slices=2"


@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 5))
def test_bubble_and_peak_are_those_of_slices(p: int, m: int, k: int) -> None:
    schedule = build("Seq1F1B", ranks=p, micro_batches=m, slices=k)
    schedule.verify()
    timeline = schedule.simulate()
    assert timeline.bubble == 3 * (p - 1)
    assert timeline.peak_activations == tuple(min(m * k, p - r + k - 1) for r in range(p))
    assert timeline.bubble_rate == pytest.approx((p - 1) / (m * k + p - 1))
    assert_forms_agree(schedule)


def test_one_slice_is_1f1b() -> None:
    sliced, whole = (
        build(name, ranks=4, micro_batches=6, **options)
        for name, options in (("Seq1F1B", {"slices": 1}), ("1F1B", {}))
    )
    assert sliced.actions == whole.actions


def test_the_text_form_names_slices() -> None:
    schedule = build("Seq1F1B", ranks=2, micro_batches=1)
    assert str(schedule).split("\n")[1:] == [
        "F0.0/0 F0.0/1 B0.0/1 B0.0/0",
        "F1.0/0 F1.0/1 B1.0/1 B1.0/0",
    ]
    assert "slices=2" in str(schedule)
    assert "SF0>1.0/1" in str(schedule.lower())
    assert repr(schedule).count("1 micro-batches of 2 slices") == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("F0.0/0 F0.0/1 B0.0/0 B0.0/1", r"B0\.0/0 stands before B0\.0/1"),
        ("F0.0/1 F0.0/0 B0.0/1 B0.0/0", r"F0\.0/1 stands before F0\.0/0"),
        ("F0.0/0 B0.0/0", r"F0\.0/1 is missing"),
        ("F0.0/0 F0.0/1 B0.0/1", r"B0\.0/0 is missing"),
        ("F0.0/0 F0.0/1 I0.0/0 I0.0/1 W0.0/1 W0.0/0", r"I0\.0/0 stands before I0\.0/1"),
        ("F0.0/0 F0.0/1 F0.0/1 B0.0/1 B0.0/0", r"F0\.0/1 stands twice"),
        ("F0.0/2", r"cannot read 'F0\.0/2'[\s\S]*2 slices"),
        ("F0.0 B0.0", r"cannot read 'F0\.0'"),
    ],
)
def test_what_is_wrong_with_slices_is_named(row: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule.parse(f"{HEADER}\n{row}").verify()


def test_a_slice_where_there_are_none_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"cannot read 'F0\.0/0'"):
        Schedule.parse(f"{HEADER.replace(' slices=2', '')}\nF0.0/0 B0.0/0")


def test_an_action_without_a_slice_is_refused() -> None:
    placement = build("Seq1F1B", ranks=1, micro_batches=1).placement
    with pytest.raises(ScheduleError, match=r"F0\.0 is of no slice"):
        Schedule("A", placement, 1, ((Action("F", 0, 0),),), slices=2)
    Schedule("A", placement, 1, ((Action("F", 0, SliceNumber(0, 0, 2)),),), slices=2)


HEADED = ("FThenB", "1F1B", "Eager1F1B", "kFkB", "ZBH1", "ZBH2")


@given(st.sampled_from(HEADED), st.integers(1, 4), st.integers(1, 9))
def test_a_head_makes_a_valid_schedule_of_any_size(name: str, p: int, m: int) -> None:
    schedule = build(name, ranks=p, micro_batches=m, head=True)
    schedule.verify()
    plan = schedule.lower()
    plan.verify()
    assert len(plan.order) == sum(map(len, plan.ops))
    assert Schedule.parse(str(schedule)) == schedule
    assert Plan.parse(str(plan)) == plan
    assert rebuild(schedule, m) == schedule
    forward_only(schedule.placement, m).lower().verify()


def test_the_drawing_of_the_file_is_of_its_schedule() -> None:
    assert table.__doc__ is not None
    drawn = [line.strip() for line in table.__doc__.splitlines() if line.startswith("    rank")]
    rendered = render(build("1F1B", ranks=2, micro_batches=4, head=True).simulate(), width=160)
    assert [line.rstrip() for line in rendered.splitlines()[:2]] == drawn


def test_parts_stand_between_the_last_stage_and_the_loss() -> None:
    placement = build("1F1B", ranks=3, micro_batches=1, head=True).placement
    assert [placement.rank_of(stage) for stage in range(7)] == [0, 1, 2, 0, 1, 2, 2]
    assert placement.stages_of(2) == (2, 5, 6)
    plan = build("1F1B", ranks=3, micro_batches=1, head=True).lower()
    assert " ".join(map(str, plan.edges)) == "0>1 1>2 2>3 2>4 2>5 3>6 4>6 5>6"


@pytest.mark.parametrize("name", ["1F1B", "ZBH1"])
@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("part", [0.25, 0.5, 1, 2.5, 6])
def test_the_bubble_is_that_of_the_body(name: str, ranks: int, part: float) -> None:
    micro_batches = 8 * ranks

    def times(stage: float, of_part: float) -> tuple[float, ...]:
        return (stage,) * ranks + (of_part,) * ranks + (0.01,)

    costs = Costs(times(1, part), times(1, part), times(1, part))
    timeline = build(name, ranks=ranks, micro_batches=micro_batches, head=True).simulate(costs)
    bound = micro_batches * 3 * (1 + part) + 3 * (ranks - 1)
    assert timeline.makespan <= 1.01 * bound
    # A rank holds at most two forwards of its stage more than without a head.
    body = max(build(name, ranks=ranks, micro_batches=micro_batches).simulate().peak_activations)
    held = [
        max(sum(1 if a.kind == "F" else -1 for a in row[:n] if a.kind in "FBW") for n in places)
        for row, places in (
            ([a for a in row if isinstance(a, Action) and a.stage < ranks], range(len(row) + 1))
            for row in timeline.schedule.actions
        )
    ]
    assert max(held) <= body + table.EXTRA_FORWARDS


def test_the_loss_takes_no_time_unless_costs_say_so() -> None:
    schedule = build("1F1B", ranks=2, micro_batches=5, head=True)
    assert schedule.simulate().busy == 5 * (3 + 3)
    assert schedule.simulate(Costs(forward=2)).busy == 5 * (4 + 4)
    assert schedule.simulate(Costs(forward=(1, 1, 1, 1, 1))).busy == 5 * (3 + 3 + 1)


def test_a_part_that_comes_too_late_is_named() -> None:
    text = str(build("1F1B", ranks=2, micro_batches=1, head=True))
    wrong = Schedule.parse(text.replace("B2.0 B0.0", "B0.0 B2.0"))
    with pytest.raises(ScheduleError, match=r"B2\.0|B0\.0|B1\.0"):
        wrong.verify()


@pytest.mark.parametrize("name", ["ZBV", "Interleaved1F1B", "Seq1F1B", "Hanayo"])
def test_other_schedules_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="FThenB, 1F1B"):
        build(name, ranks=2, micro_batches=4, head=True)
