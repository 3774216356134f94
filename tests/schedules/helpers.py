"""Written and random schedules, and a reader of orders."""

from __future__ import annotations

import random
from collections.abc import Sequence

from fleetpipe.schedules import (
    Action,
    Dependencies,
    Edge,
    Free,
    Fused,
    Item,
    Placement,
    Plan,
    Recv,
    Schedule,
    Send,
)
from fleetpipe.schedules.action import parts

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
    """Plays ``plan.order`` in one process; fails where an op would wait or lack what it uses."""
    at = [0] * len(plan.ops)
    under_way: list[tuple[object, ...]] = []
    #: What each rank has: outputs "F" of a stage, gradients "B" of its inputs, activations "A".
    values: list[set[tuple[str, int, int]]] = [set() for _ in plan.ops]
    for rank in plan.order:
        op, has = plan.ops[rank][at[rank]], values[rank]
        at[rank] += 1
        if isinstance(op, (Send, Recv)):
            value = (op.kind, op.edge.source if op.kind == "F" else op.edge.target, op.micro_batch)
            if isinstance(op, Send):
                assert {value, ("A", *value[1:])} <= has if op.kind == "F" else value in has
                under_way.append(op[:3])
            else:
                under_way.remove(op[:3])
                has.add(value)
        elif isinstance(op, Free):
            has.remove(("A", op.stage, op.micro_batch))
        elif isinstance(op, (Action, Fused)):
            for action in parts(op):
                assert has >= _used(plan, action)
                made = {"F": "FA", "B": "B", "I": "B", "W": ""}[action.kind]
                has.update((kind, *action[1:]) for kind in made)
    assert at == [len(row) for row in plan.ops]
    assert under_way == []


def _used(plan: Plan, action: Action) -> set[tuple[str, int, int]]:
    """The values that an action computes with."""
    kind, stage, micro_batch = action
    if kind == "F":
        return {("F", edge.source, micro_batch) for edge in plan.edges if edge.target == stage}
    activations = ("A", stage, micro_batch)
    if kind == "W":
        return {activations, ("B", stage, micro_batch)}
    after = {("B", edge.target, micro_batch) for edge in plan.edges if edge.source == stage}
    return {activations, *after}
