"""Written and random schedules, and a reader of orders."""

from __future__ import annotations

import random
from collections.abc import Sequence

from fleetpipe.schedules import (
    Action,
    Dependencies,
    Edge,
    Fused,
    Item,
    Placement,
    Plan,
    Recv,
    Schedule,
    Send,
)

#: The schedules with one chunk on a rank and whole backwards; they have the same bubble.
WHOLE = ("FThenB", "1F1B", "Eager1F1B")


def schedule_of(placement: Placement, micro_batches: int, *rows: str) -> Schedule:
    """Returns the schedule of the given rows of tokens."""
    header = (
        f"# fleetpipe-schedule 1 name=Written ranks={placement.ranks}"
        f" micro_batches={micro_batches} chunks={placement.chunks} placement={placement.name}"
    )
    return Schedule.parse("\n".join((header, *rows)))


def random_schedule(
    seed: int, placement: Placement, micro_batches: int, edges: Sequence[Edge]
) -> Schedule:
    """Returns a valid schedule: one random order of all actions, each given to its rank.

    Some backwards are split, and some pairs of actions that could run at once are fused.
    """
    chance = random.Random(seed)
    rule = Dependencies(edges, placement.stages)
    left: set[Action] = set()
    for stage in range(placement.stages):
        for k in range(micro_batches):
            kinds = "FIW" if chance.random() < 0.4 else "FB"
            left |= {Action(kind, stage, k) for kind in kinds}
    done: set[tuple[str, int, int]] = set()
    rows: list[list[Item]] = [[] for _ in range(placement.ranks)]
    while left:
        ready = sorted(
            action
            for action in left
            if all((*need, action.micro_batch) in done for need in rule.of(*action[:2]))
        )
        first = chance.choice(ready)
        rank = placement.rank_of(first.stage)
        others = [a for a in ready if a != first and placement.rank_of(a.stage) == rank]
        unit: tuple[Action, ...] = (first,)
        if others and chance.random() < 0.3:
            unit = (first, chance.choice(others))
        rows[rank].append(Fused(unit) if len(unit) > 1 else first)
        left -= set(unit)
        done |= {("B" if a.kind == "I" else a.kind, a.stage, a.micro_batch) for a in unit}
    return Schedule("Random", placement, micro_batches, tuple(map(tuple, rows)))


def random_edges(seed: int, stages: int) -> tuple[Edge, ...]:
    """Returns the chain with some skip connections, sometimes two between the same stages."""
    chance = random.Random(seed)
    edges = [Edge(stage, stage + 1) for stage in range(stages - 1)]
    for source in range(stages):
        for target in range(source + 1, stages):
            if chance.random() < 0.2:
                edges.append(Edge(source, target, "mask"))
    return tuple(edges)


def assert_forms_agree(schedule: Schedule) -> None:
    """The schedule and its plan can run, and are what their texts say."""
    assert Schedule.parse(str(schedule)) == schedule
    plan = schedule.lower()
    plan.verify()
    follow(plan)
    assert plan.schedule == schedule
    assert Plan.parse(str(plan)) == plan


def follow(plan: Plan) -> None:
    """Plays ``plan.order`` in one process; fails where an op would have to wait."""
    at = [0] * len(plan.ops)
    under_way: list[tuple[object, ...]] = []
    for rank in plan.order:
        op = plan.ops[rank][at[rank]]
        at[rank] += 1
        if isinstance(op, Send):
            under_way.append(op[:3])
        elif isinstance(op, Recv):
            under_way.remove(op[:3])
    assert at == [len(row) for row in plan.ops]
    assert under_way == []
