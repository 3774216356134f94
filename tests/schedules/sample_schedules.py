"""Schedules for tests: written and random ones, a reader of orders, and what each declares."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import floor

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
from fleetpipe.schedules.families.one_f_one_b import balanced_groups

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


VEE = ("ZBV", "VHalf", "VMin", "DualPipeV")
SINGLE = ("Eager1F1B", "kFkB", "ZBH2")


#: The bubble by the costs of a chunk, from m = 2p on, with W not longer than F or I.
BUBBLES = {
    **dict.fromkeys(("FThenB", "1F1B", "Eager1F1B", "kFkB", "Interleaved1F1B"), "(p-1)*(F+B)"),
    "ZBH1": "(p-1)*(F+I-W)",
    "ZBH2": "(p-1)*(F+I-2*W)",
    "DualPipeV": "(p-1)*(FB+B-3*W)",
}
#: The most forwards of a chunk that rank r holds; g0 is the first of the groups, k of kFkB's.
PEAKS = {
    "FThenB": "m*v",
    "1F1B": "min(m, p-r)",
    "Eager1F1B": "min(m, 2*(p-r)-1)",
    "kFkB": "min(m, k*(p-r))",
    "Interleaved1F1B": "min(m*v, (v-1)*g0 + 2*(p-1-r) + 1)",
    "ZBH1": "min(m*v, (v-1)*g0 + p)",
    "ZBH2": "min(m, 2*p-1)",
    "ZBV": "min(2*m, 2*p, m+r+1)",
    "VHalf": "min(2*m, 2*floor((p+2)/2))",
    "VMin": "min(2*m, 2*floor((p+4)/3))",
    "DualPipeV": "min(2*m, 2*p+1, m+r+1)",
}
#: For F = I = W = 1, and FB = 3; ``costs`` is DualPipeV's bubble where F = I and FB >= F+B.
OF_ZBV = {"bubble": "2*max(0, 2*p-1-m)", "makespan": "max(6*m + p-1, 4*(m+p) - 2)"}
OF_DUALPIPEV = {
    "many": "2*(p-1) + 2*max(0, 2*p-m)",
    "few": "5*p-3-2*m",
    "costs": "(p-1)*(FB + B - 2*W - min(F, W))",
}
#: Peaks of w waves for m <= p.
OF_HANAYO = {"first rank": "(2*w-1)*m + 1", "last rank": "2*w*m"}


def takes(name: str, chunks: int) -> bool:
    """Whether a schedule exists with so many chunks on a rank."""
    return chunks == 2 if name in VEE else chunks == 1 or name not in SINGLE


def peaks(name: str, p: int, v: int, m: int) -> list[int]:
    """Returns for each rank the most forwards of one chunk that it may hold."""
    formula = PEAKS["Interleaved1F1B" if name == "1F1B" and v > 1 else name]
    first = balanced_groups(p, m)[0]
    return [int(value(formula, p=p, v=v, m=m, r=rank, g0=first, k=2)) for rank in range(p)]


def value(formula: str, **names: float) -> float:
    """Returns what a formula gives for p ranks, m micro-batches, v chunks on rank r, and so on."""
    return float(eval(formula, {"min": min, "max": max, "floor": floor}, names))


def bubble(name: str, p: int, v: int, m: int) -> tuple[int, bool]:
    """Returns the bubble, and whether it is exact or else the most that it may be."""
    few = max(0, p - m)
    formulas: dict[str, Callable[[], tuple[int, bool]]] = {
        "ZBH1": lambda: (p - 1 + (2 * v - 1) * few, few == 0 or v == 1),
        "ZBH2": lambda: (max(0, 2 * p - 1 - m), True),
        "ZBV": lambda: (int(value(OF_ZBV["bubble"], p=p, m=m)), True),
        "VHalf": lambda: v_half(p, m),
        "VMin": lambda: v_min(p, m),
        "DualPipeV": lambda: (int(value(OF_DUALPIPEV["many" if m > p else "few"], p=p, m=m)), True),
    }
    whole = (3 * (p - 1) + 3 * (v - 1) * few, True)
    return formulas[name]() if name in formulas else whole


def v_half(p: int, m: int) -> tuple[int, bool]:
    full = 3 * p - 7 if p % 2 == 0 else 3 * p - 4
    return max(full, 1 if p == 2 else 0, 4 * p - 3 - 2 * m if p > 1 else 0), m >= p


def v_min(p: int, m: int) -> tuple[int, bool]:
    if p % 3 == 0:
        return max(4 * p - 7, 4 * p - 3 - 2 * m), m >= p
    return max(0, 4 * p - 5), True
