from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpipe.errors import ConfigError, ScheduleError
from fleetpipe.schedules import Action, Costs, Plan, Schedule, build, forward_only, rebuild, render
from fleetpipe.schedules.families import head

HEADED = ("FThenB", "1F1B", "Eager1F1B", "kFkB", "ZBH1", "ZBH2")


@given(st.sampled_from(HEADED), st.integers(1, 5), st.integers(1, 12))
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
    assert head.__doc__ is not None
    drawn = [line.strip() for line in head.__doc__.splitlines() if line.startswith("    rank")]
    rendered = render(build("1F1B", ranks=2, micro_batches=4, head=True).simulate(), width=160)
    assert [line.rstrip() for line in rendered.splitlines()[:2]] == drawn


def test_parts_stand_between_the_last_stage_and_the_loss() -> None:
    placement = build("1F1B", ranks=3, micro_batches=1, head=True).placement
    assert [placement.rank_of(stage) for stage in range(7)] == [0, 1, 2, 0, 1, 2, 2]
    assert placement.stages_of(2) == (2, 5, 6)
    plan = build("1F1B", ranks=3, micro_batches=1, head=True).lower()
    assert " ".join(map(str, plan.edges)) == "0>1 1>2 2>3 2>4 2>5 3>6 4>6 5>6"


@pytest.mark.parametrize("name", ["1F1B", "ZBH1"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
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
    assert max(held) <= body + head.AHEAD


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


@pytest.mark.parametrize("name", ["ZBV", "Interleaved1F1B", "Seq1F1B", "Hanayo", "auto"])
def test_other_schedules_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="FThenB, 1F1B"):
        build(name, ranks=2, micro_batches=4, head=True)
