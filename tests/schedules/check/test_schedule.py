from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpipe.errors import ConfigError, ScheduleError
from fleetpipe.schedules import (
    Action,
    Dependencies,
    Edge,
    Placement,
    Schedule,
    build,
    chain,
    names,
)
from fleetpipe.schedules.action import parts
from fleetpipe.schedules.placement import distance_to_slice_before
from tests.schedules.sample_schedules import schedule_of

pytestmark = pytest.mark.no_paddle

TWO = Placement("loop", 2)


@pytest.mark.parametrize(
    ("rows", "summary", "where"),
    [
        (("F0.0 F0.1 B0.0", "F1.0 B1.0 F1.1 B1.1"), "B0.1 is missing", "rank 0"),
        (("F0.0 F0.1 B0.0 B0.1", "-"), "F1.0 is missing", "rank 1"),
        (
            ("F0.0 F0.1 B0.0 B0.1 B0.1", "F1.0 B1.0 F1.1 B1.1"),
            "B0.1 stands twice",
            "rank 0 at #4: ... F0.1 B0.0 B0.1 >>B0.1<<",
        ),
        # Sets would not see these two: one micro-batch has two backwards and the other none.
        (("F0.0 F0.1 B0.0 B0.0", "F1.0 B1.0 F1.1 B1.1"), "B0.0 stands twice", "rank 0 at #3"),
        (("F0.0 F0.1 B0.0 I0.0 W0.0", "F1.0 B1.0 F1.1 B1.1"), "I0.0 repeats", "rank 0 at #3"),
        (("F0.0 F0.1 B0.0 W0.0 I0.1", "F1.0 B1.0 F1.1 B1.1"), "W0.0 repeats", "rank 0 at #3"),
        (("F0.0 F0.1 I0.0 B0.1", "F1.0 B1.0 F1.1 B1.1"), "W0.0 is missing", "rank 0"),
        (("F0.0 F0.1 W0.0 B0.1", "F1.0 B1.0 F1.1 B1.1"), "I0.0 is missing", "rank 0"),
        (
            ("F0.0 F0.1 B0.0 B0.1 F1.0", "B1.0 F1.1 B1.1"),
            "F1.0 is on the wrong rank",
            "rank 0 at #4",
        ),
        (("(F0.0|F1.0) F0.1 B0.0 B0.1", "B1.0 F1.1 B1.1"), "F1.0 is on the wrong", "rank 0 at #0"),
        (("F0.0 F0.1 B0.0 B0.1 F2.0", "F1.0 B1.0 F1.1 B1.1"), "F2.0 is of a stage", "rank 0 at #4"),
        (
            ("F0.0 F0.1 B0.0 B0.1", "F1.0 B1.0 F1.2 B1.1"),
            "F1.2 is of a micro-batch",
            "rank 1 at #2",
        ),
        (
            ("F0.0 F0.1 B0.0 B0.1", "F1.0 B1.0 B1.1 F1.1"),
            "B1.1 stands before F1.1",
            "rank 1 at #2: F1.0 B1.0 >>B1.1<< F1.1",
        ),
        (
            ("F0.0 F0.1 B0.0 B0.1", "F1.0 W1.0 I1.0 F1.1 B1.1"),
            "W1.0 stands before I1.0",
            "rank 1 at #1",
        ),
        (
            ("F0.0 F0.1 B0.0 B0.1", "F1.0 (F1.1|B1.1) B1.0"),
            "B1.1 is fused with F1.1",
            "rank 1 at #1: F1.0 >>(F1.1|B1.1)<< B1.0",
        ),
    ],
)
def test_the_culprit_is_named_with_its_place(
    rows: tuple[str, ...], summary: str, where: str
) -> None:
    with pytest.raises(ScheduleError) as error:
        schedule_of(TWO, 2, *rows).verify()
    assert str(error.value).startswith(summary)
    assert where in str(error.value)


def test_a_deadlock_is_shown_as_its_shortest_cycle() -> None:
    schedule = schedule_of(
        Placement("loop", 3), 2, "F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1", "F2.1 B2.1 F2.0 B2.0"
    )
    with pytest.raises(ScheduleError) as error:
        schedule.verify()
    message = str(error.value)
    assert "2 ranks wait for each other" in message
    assert "rank 0 at #1 B0.0 waits for B1.0, which rank 1 has at #2, behind F1.1" in message
    assert "rank 1 at #1 F1.1 waits for F0.1, which rank 0 has at #2, behind B0.0" in message
    assert "rank 0 at #1: F0.0 >>B0.0<< F0.1 B0.1" in message


def test_a_fused_pair_waits_as_one() -> None:
    rows = ("F0.0 (F0.1|B0.0) B0.1", "F1.0 F1.1 B1.0 B1.1")
    with pytest.raises(ScheduleError, match=r"rank 0 at #1 B0\.0 waits for B1\.0"):
        schedule_of(TWO, 2, *rows).verify()


def test_a_skip_connection_can_close_a_cycle() -> None:
    schedule = schedule_of(
        Placement("loop", 2, 2), 2, "F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1",
    )  # fmt: skip
    schedule.verify()
    schedule.verify((*chain(4), Edge(0, 3, "skip")))
    backwards = schedule_of(Placement("loop", 3), 1, "F0.0 B0.0", "F1.0 B1.0", "F2.0 B2.0")
    backwards.verify((Edge(0, 2),))
    with pytest.raises(ConfigError, match="2>0 does not lead"):
        backwards.verify((Edge(2, 0),))


def test_a_backward_in_a_forward_only_schedule_is_refused() -> None:
    schedule = Schedule(
        "E", Placement("loop", 1), 1, ((Action("F", 0, 0), Action("B", 0, 0)),), forward_only=True
    )
    with pytest.raises(ScheduleError, match=r"B0\.0 is a backward in a forward-only schedule"):
        schedule.verify()


def test_an_unknown_kind_is_refused() -> None:
    schedule = Schedule("E", Placement("loop", 1), 1, ((Action("F", 0, 0), Action("X", 0, 0)),))
    with pytest.raises(ScheduleError, match=r"X0\.0 has the unknown kind 'X'"):
        schedule.verify()


def test_a_header_that_promises_too_much_costs_no_memory() -> None:
    with pytest.raises(ScheduleError, match=r"F0\.1 is missing"):
        schedule_of(Placement("loop", 1), 10**12, "F0.0 B0.0").verify()


def test_the_memory_cap_names_where_it_is_first_passed() -> None:
    schedule = build("1F1B", ranks=4, micro_batches=8)
    schedule.verify(memory_cap=4)
    with pytest.raises(ScheduleError) as error:
        schedule.verify(memory_cap=2)
    message = str(error.value)
    assert "rank 0 passes the memory cap at F0.2" in message
    assert "rank 0 at #2: F0.0 F0.1 >>F0.2<< F0.3" in message
    assert "at most 2" in message
    assert "3 there, 4 at the peak of the rank" in message
    with pytest.raises(ConfigError, match="above 0"):
        schedule.verify(memory_cap=0)


@given(st.sampled_from(names()), st.integers(1, 4), st.integers(1, 8), st.data())
def test_every_mutation_is_rejected_and_its_culprit_named(
    name: str, ranks: int, m: int, data: st.DataObject
) -> None:
    schedule = build(name, ranks=ranks, micro_batches=m)
    rank = data.draw(st.integers(0, ranks - 1))
    mutation = data.draw(st.sampled_from(["drop", "double", "move", "swap"]))
    mutated, culprits = mutate(schedule, mutation, rank, data)
    with pytest.raises(ScheduleError) as error:
        mutated.verify()
    assert any(str(action) in str(error.value) for action in culprits)


def mutate(
    schedule: Schedule, mutation: str, rank: int, data: st.DataObject
) -> tuple[Schedule, tuple[Action, ...]]:
    """Returns the schedule with one error, and the actions one of which is at fault."""
    rows = [list(row) for row in schedule.actions]
    position = data.draw(st.integers(0, len(rows[rank]) - 1))
    culprits = parts(rows[rank][position])
    if mutation == "double":
        rows[rank].insert(data.draw(st.integers(0, len(rows[rank]))), rows[rank][position])
    elif mutation == "swap":
        needed, later = data.draw(st.sampled_from(dependent_pairs(schedule, rank)))
        culprits = parts(rows[rank][needed]) + parts(rows[rank][later])
        rows[rank][needed], rows[rank][later] = rows[rank][later], rows[rank][needed]
    else:
        item = rows[rank].pop(position)
        others = [r for r in range(len(rows)) if r != rank]
        if mutation == "move" and others:
            other = data.draw(st.sampled_from(others))
            rows[other].insert(data.draw(st.integers(0, len(rows[other]))), item)
    actions = tuple(map(tuple, rows))
    return replace(schedule, actions=actions), culprits


def dependent_pairs(schedule: Schedule, rank: int) -> list[tuple[int, int]]:
    """Returns the positions of all entries of a rank that wait for one another."""
    stages = schedule.placement.stages
    rule = Dependencies(chain(stages), stages)
    places = {
        (action.kind.replace("I", "B"), *action[1:]): position
        for position, item in enumerate(schedule.actions[rank])
        for action in parts(item)
    }
    waits = [
        ((*need, micro_batch), position)
        for (kind, stage, micro_batch), position in places.items()
        for need in rule.of(kind, stage)
    ]
    for (kind, stage, unit), position in places.items():
        away = distance_to_slice_before(kind, unit % schedule.slices, schedule.slices)
        if away:
            waits.append(((kind, stage, unit + away), position))
    return [(places[need], position) for need, position in waits if need in places]
