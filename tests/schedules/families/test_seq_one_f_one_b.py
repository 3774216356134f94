from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpipe.errors import ConfigError, ScheduleError
from fleetpipe.schedules import Action, Costs, Plan, Schedule, build
from fleetpipe.schedules.action import SliceNumber
from tests.schedules.helpers import assert_forms_agree

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


def test_half_the_memory_and_half_the_bubble_with_two_slices_for_many_ranks() -> None:
    whole = build("1F1B", ranks=8, micro_batches=16).simulate(Costs(2, 2, 2))
    timeline = build("Seq1F1B", ranks=8, micro_batches=16, slices=2).simulate()
    assert (timeline.bubble, whole.bubble) == (21, 42)
    assert (timeline.peak_activations[0] / 2, whole.peak_activations[0]) == (4.5, 8)


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


@pytest.mark.parametrize("slices", [0, -1, 1.5, True])
def test_a_number_of_slices_is_required(slices: object) -> None:
    with pytest.raises(ConfigError, match="slices"):
        build("Seq1F1B", ranks=2, micro_batches=4, slices=slices)


def test_other_schedules_have_no_slices() -> None:
    with pytest.raises(ConfigError, match="no option 'slices'"):
        build("1F1B", ranks=2, micro_batches=4, slices=2)


def test_a_plan_whose_slices_are_out_of_order_is_refused() -> None:
    plan = build("Seq1F1B", ranks=1, micro_batches=1).lower()
    rows = str(plan).replace("F0.0/0 F0.0/1", "F0.0/1 F0.0/0")
    with pytest.raises(ScheduleError, match=r"F0\.0/1 stands before F0\.0/0"):
        Plan.parse(rows).verify()
