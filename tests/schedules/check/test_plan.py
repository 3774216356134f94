from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpipe.errors import ConfigError, ScheduleError
from fleetpipe.schedules import (
    Edge,
    Free,
    Op,
    Placement,
    Plan,
    Recv,
    Reduce,
    Schedule,
    Send,
    Step,
    build,
    chain,
    forward_only,
)
from tests.schedules.sample_schedules import follow, random_edges, random_schedule, schedule_of

pytestmark = pytest.mark.no_paddle


def plan_of(*rows: str, ranks: int = 2, micro_batches: int = 1, edges: str = "0>1") -> Plan:
    header = (
        f"# fleetpipe-plan 1 name=Written ranks={ranks} micro_batches={micro_batches} chunks=1"
        f" placement=loop edges={edges}"
    )
    return Plan.parse("\n".join((header, *rows)))


def test_the_text_form_is_exactly_this() -> None:
    plan = build("1F1B", ranks=2, micro_batches=1).lower()
    assert str(plan) == (
        "# fleetpipe-plan 1 name=1F1B ranks=2 micro_batches=1 chunks=1 placement=loop edges=0>1\n"
        "F0.0 SF0>1.0 RB0>1.0 B0.0 FREE0.0 REDUCE STEP\n"
        "RF0>1.0 F1.0 B1.0 SB0>1.0 FREE1.0 REDUCE STEP"
    )


def test_an_edge_inside_a_rank_has_no_transfer_and_w_releases() -> None:
    plan = schedule_of(Placement("vee", 1, 2), 1, "F0.0 F1.0 I1.0 I0.0 W1.0 W0.0").lower()
    plan.verify()
    assert str(plan).split("\n")[1] == "F0.0 F1.0 I1.0 I0.0 W1.0 FREE1.0 W0.0 FREE0.0 REDUCE STEP"


def test_named_edges_are_transferred_one_by_one() -> None:
    edges = (Edge(0, 1), Edge(0, 2, "mask"), Edge(1, 2))
    plan = build("1F1B", ranks=3, micro_batches=1).lower(edges)
    plan.verify()
    assert str(plan).split("\n")[1].startswith("F0.0 SF0>1.0 SF0>2:mask.0 ")
    assert "edges=0>1,0>2:mask,1>2" in str(plan)
    assert Plan.parse(str(plan)) == plan


def test_a_fused_pair_releases_and_sends_at_its_end() -> None:
    plan = schedule_of(
        Placement("loop", 2), 2, "F0.0 F0.1 B0.0 B0.1", "F1.0 (F1.1|B1.0) B1.1"
    ).lower()
    plan.verify()
    assert "(F1.1|B1.0) SB0>1.0 FREE1.0 B1.1" in str(plan)


@pytest.mark.parametrize("number", ["micro_batches", "chunks"])
def test_a_number_that_no_plan_can_have_costs_no_memory(number: str) -> None:
    text = str(build("1F1B", ranks=1, micro_batches=1).lower())
    large = text.replace(f"{number}=1", f"{number}={10**15}")
    with pytest.raises(ScheduleError, match="is missing"):
        Plan.parse(large).verify()


@pytest.mark.parametrize("row", ["(F1.0|B1.0)", "(F1.0|I1.0) W1.0", "F1.0 (I1.0|W1.0)"])
def test_a_fused_unit_does_not_wait_for_itself(row: str) -> None:
    plan = plan_of(
        "F0.0 SF0>1.0 RB0>1.0 B0.0 FREE0.0 REDUCE STEP",
        f"RF0>1.0 {row} SB0>1.0 FREE1.0 REDUCE STEP",
    )
    with pytest.raises(ScheduleError, match=r"is fused with .*, which it waits for"):
        plan.verify()


@pytest.mark.parametrize(
    ("placement", "m"),
    [
        (Placement("loop", 1), 1),
        (Placement("loop", 4), 3),
        (Placement("loop", 3, 2), 7),
        (Placement("vee", 4, 2), 5),
    ],
)
def test_forward_only_releases_after_its_sends_and_never_steps(
    placement: Placement, m: int
) -> None:
    schedule = forward_only(placement, m)
    schedule.verify()
    assert schedule.simulate().peak_activations == (1,) * placement.ranks
    plan = schedule.lower()
    plan.verify()
    follow(plan)
    assert Plan.parse(str(plan)) == plan
    assert type(schedule).parse(str(schedule)) == schedule
    ops = [op for row in plan.ops for op in row]
    assert not any(isinstance(op, (Reduce, Step)) for op in ops)
    assert sum(isinstance(op, Free) for op in ops) == placement.stages * m


def test_forward_only_takes_the_deeper_stage_first() -> None:
    assert str(forward_only(Placement("vee", 2, 2), 3)) == (
        "# fleetpipe-schedule 1 name=ForwardOnly ranks=2 micro_batches=3 chunks=2 placement=vee"
        " forward_only=true\n"
        "F0.0 F0.1 F0.2 F3.0 F3.1 F3.2\n"
        "F1.0 F2.0 F1.1 F2.1 F1.2 F2.2"
    )
    loop = forward_only(Placement("loop", 2, 2), 3)
    assert str(loop).split("\n")[1] == "F0.0 F0.1 F2.0 F0.2 F2.1 F2.2"


def test_sends_and_receives_of_the_same_content_differ() -> None:
    assert len({Send("F", Edge(0, 1), 3), Recv("F", Edge(0, 1), 3)}) == 2
    assert len({Reduce(), Step()}) == 2
    assert str(Send("B", Edge(0, 2, "mask"), 3)) == "SB0>2:mask.3"


def test_reductions_come_after_all_computations_in_the_order_and_steps_last() -> None:
    plan = build("1F1B", ranks=3, micro_batches=4).lower()
    assert sorted(plan.order[-6:-3]) == sorted(plan.order[-3:]) == [0, 1, 2]


@given(st.integers(0, 10**9), st.integers(1, 4), st.sampled_from(["loop1", "loop2", "vee"]))
def test_lowering_never_deadlocks(seed: int, ranks: int, shape: str) -> None:
    placement = Placement(shape.rstrip("12"), ranks, 1 if shape == "loop1" else 2)
    edges = random_edges(seed, placement.stages)
    schedule = random_schedule(seed, placement, 3, edges)
    assert Schedule.parse(str(schedule)) == schedule
    plan = schedule.lower(edges)
    plan.verify()
    follow(plan)
    assert Plan.parse(str(plan)) == plan
    assert Plan.parse(str(plan)).order == plan.order


FIRST = "F0.0 SF0>1.0 RB0>1.0 B0.0 FREE0.0 REDUCE STEP"
SECOND = "RF0>1.0 F1.0 B1.0 SB0>1.0 FREE1.0 REDUCE STEP"

# A token of the two rows above, what stands there instead, the error, and its place.
BROKEN = [
    ("F0.0 SF0>1.0", "F0.0", "RF0>1.0 has no send", "rank 1 at #0"),
    ("RF0>1.0 F1.0", "F1.0", "F1.0 stands before its input", "rank 1 at #0: >>F1.0<<"),
    ("RB0>1.0 B0.0", "B0.0 RB0>1.0", "B0.0 stands before its input", "rank 0 at #2"),
    ("F0.0 SF0>1.0", "SF0>1.0 F0.0", "SF0>1.0 stands before its value", "rank 0 at #0"),
    ("B1.0 SB0>1.0 FREE1.0", "SB0>1.0 B1.0 FREE1.0", "SB0>1.0 stands before its value", "at #2"),
    ("B0.0 FREE0.0", "FREE0.0 B0.0", "FREE0.0 stands before the last use", "rank 0 at #3"),
    ("B0.0 FREE0.0", "B0.0", "FREE0.0 is missing", "rank 0 at #6"),
    ("FREE0.0", "FREE0.0 FREE0.0", "FREE0.0 stands twice", "rank 0 at #5"),
    ("FREE0.0", "FREE0.0 FREE1.0", "FREE1.0 is of a stage that rank 0 does", "rank 0 at #5"),
    ("B0.0 FREE0.0 REDUCE", "REDUCE B0.0 FREE0.0", "REDUCE stands before B0.0", "rank 0 at #3"),
    ("FREE0.0 REDUCE STEP", "FREE0.0 STEP REDUCE", "STEP stands before REDUCE", "rank 0 at #5"),
    ("FREE0.0 REDUCE", "FREE0.0", "REDUCE is missing", "rank 0 at #6"),
    ("FREE0.0 REDUCE STEP", "FREE0.0 REDUCE", "REDUCE stands before the end", "rank 0 at #5"),
    ("FREE0.0 REDUCE STEP", "FREE0.0", "REDUCE is missing", "rank 0 at #5"),
    ("RB0>1.0", "RF0>1.0 RB0>1.0", "RF0>1.0 is on the wrong rank", "rank 0 at #2"),
    ("F0.0 SF0>1.0", "F0.0 SF0>1:mask.0", "SF0>1:mask.0 is of an edge that", "rank 0 at #1"),
    ("F0.0 SF0>1.0", "F0.0 SF0>1.1", "SF0>1.1 is of a micro-batch that", "rank 0 at #1"),
    (
        "B0.0 FREE0.0",
        "FREE0.0",
        "the computations of the plan are no valid schedule: B0.0 is missing",
        "rank 0",
    ),
]


@pytest.mark.parametrize(("old", "new", "summary", "where"), BROKEN)
def test_the_culprit_is_named_with_its_place(old: str, new: str, summary: str, where: str) -> None:
    plan_of(FIRST, SECOND).verify()
    broken = f"{FIRST}\n{SECOND}".replace(old, new, 1)
    with pytest.raises(ScheduleError) as error:
        plan_of(broken).verify()
    assert str(error.value).startswith(summary)
    assert where in str(error.value)


def test_a_transfer_inside_one_rank_is_refused() -> None:
    text = str(schedule_of(Placement("vee", 1, 2), 1, "F0.0 F1.0 B1.0 B0.0").lower())
    with pytest.raises(ScheduleError, match=r"SF0>1\.0 is of an edge inside one rank"):
        Plan.parse(text.replace("F0.0 ", "F0.0 SF0>1.0 ")).verify()


def test_a_forward_only_plan_sends_before_it_releases_and_has_no_step() -> None:
    text = str(forward_only(Placement("loop", 2), 1).lower())
    with pytest.raises(ScheduleError, match=r"SF0>1\.0 stands after the activations were released"):
        Plan.parse(text.replace("SF0>1.0 FREE0.0", "FREE0.0 SF0>1.0")).verify()
    with pytest.raises(ScheduleError, match="STEP in a forward-only plan"):
        Plan.parse(text + " STEP").verify()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            "RF0>1.1 RF0>1.0 F1.0 B1.0 SB0>1.0 FREE1.0 F1.1 B1.1 SB0>1.1 FREE1.1 REDUCE STEP",
            [
                "rank 0 sends SF0>1.0 where rank 1 receives RF0>1.1",
                "rank 0 at #1: F0.0 >>SF0>1.0<< F0.1",
                "rank 1 at #0: >>RF0>1.1<< RF0>1.0",
            ],
        ),
        # Both ranks send before they receive, which only a transport with buffers lets pass.
        (
            "RF0>1.0 F1.0 B1.0 SB0>1.0 FREE1.0 RF0>1.1 F1.1 B1.1 SB0>1.1 FREE1.1 REDUCE STEP",
            [
                "deadlock: 2 ranks",
                "rank 0 at #3 SF0>1.1 waits for rank 1, which is at #3 SB0>1.0",
                "rank 1 at #3 SB0>1.0 waits for rank 0, which is at #3 SF0>1.1",
            ],
        ),
    ],
)
def test_channels_that_do_not_go_together_are_shown_at_both_ends(
    row: str, words: list[str]
) -> None:
    plan = plan_of(
        "F0.0 SF0>1.0 F0.1 SF0>1.1 RB0>1.0 B0.0 FREE0.0 RB0>1.1 B0.1 FREE0.1 REDUCE STEP",
        row,
        micro_batches=2,
    )
    with pytest.raises(ScheduleError) as error:
        plan.verify()
    assert [word for word in words if word not in str(error.value)] == []
    with pytest.raises(ScheduleError, match="deadlock"):
        _ = plan.order


def test_a_send_without_a_receive_is_found() -> None:
    plan = plan_of(
        "F0.0 SF0>1.0 SF0>1:x.0 RB0>1.0 RB0>1:x.0 B0.0 FREE0.0 REDUCE STEP",
        "RF0>1.0 RF0>1:x.0 F1.0 B1.0 SB0>1.0 SB0>1:x.0 FREE1.0 REDUCE STEP",
        edges="0>1,0>1:x",
    )
    plan.verify()
    text = str(plan).replace(" RB0>1:x.0", "")
    with pytest.raises(ScheduleError, match=r"B0\.0 stands before its input"):
        Plan.parse(text).verify()
    text = str(forward_only(Placement("loop", 2), 2).lower())
    with pytest.raises(ScheduleError, match=r"SF0>1\.1 stands twice"):
        Plan.parse(text.replace("SF0>1.1", "SF0>1.1 SF0>1.1")).verify()


def test_a_wait_for_a_rank_that_has_ended_is_named() -> None:
    with pytest.raises(ScheduleError, match=r"SF0>1\.0 waits for rank 1, which is at its end"):
        _ = plan_of("F0.0 SF0>1.0", "F1.0").order


LOWERED = [
    build("FThenB", ranks=3, micro_batches=4).lower(),
    build("1F1B", ranks=3, micro_batches=4).lower(),
    build("Eager1F1B", ranks=2, micro_batches=5).lower(),
    build("ZBH1", ranks=3, micro_batches=4).lower(),
    build("ZBV", ranks=2, micro_batches=4).lower((*chain(4), Edge(0, 2, "skip"))),
    forward_only(Placement("vee", 2, 2), 3).lower(),
]


def changed(plan: Plan, rank: int, row: list[Op]) -> Plan:
    ops = (*plan.ops[:rank], tuple(row), *plan.ops[rank + 1 :])
    return Plan(plan.name, plan.placement, plan.micro_batches, plan.edges, ops, plan.forward_only)


@given(st.sampled_from(LOWERED), st.data())
def test_swapping_two_transfers_of_a_channel_is_flagged(plan: Plan, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(plan.ops) - 1))
    row = list(plan.ops[rank])
    channels: dict[tuple[object, ...], list[int]] = {}
    for position, op in enumerate(row):
        if isinstance(op, (Send, Recv)):
            channels.setdefault((op.letter, op.kind, op.edge), []).append(position)
    positions = data.draw(st.sampled_from(sorted(channels.values())))
    pair = st.lists(st.sampled_from(positions), min_size=2, max_size=2, unique=True)
    first, second = data.draw(pair)
    row[first], row[second] = row[second], row[first]
    with pytest.raises(ScheduleError):
        changed(plan, rank, row).verify()


@given(st.sampled_from(LOWERED), st.booleans(), st.data())
def test_no_op_can_be_left_out_or_doubled(plan: Plan, double: bool, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(plan.ops) - 1))
    row = list(plan.ops[rank])
    position = data.draw(st.integers(0, len(row) - 1))
    row[position : position + 1] = [row[position]] * (2 if double else 0)
    with pytest.raises(ScheduleError):
        changed(plan, rank, row).verify()


def test_edges_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="0>5 does not lead"):
        build("1F1B", ranks=2, micro_batches=1).lower((Edge(0, 5),))


@given(st.integers(0, 10**6))
def test_a_plan_with_an_op_elsewhere_is_refused_or_runs(seed: int) -> None:
    chance = random.Random(seed)
    placement = chance.choice((Placement("loop", 2, 2), Placement("vee", 2, 2)))
    edges = random_edges(seed, placement.stages)
    plan = random_schedule(seed, placement, 2, edges).lower(edges)
    rows = [list(row) for row in plan.ops]
    row = chance.choice(rows)
    row.insert(chance.randrange(len(row)), row.pop(chance.randrange(len(row))))
    changed = Plan(plan.name, placement, 2, plan.edges, tuple(map(tuple, rows)))
    try:
        changed.verify()
    except ScheduleError:
        return
    follow(changed)
