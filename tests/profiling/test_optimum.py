"""Plans of small models beside the exact optimum, which is found by mixed-integer programming."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest

from fleetpipe.profiling import Profile, StageCost, plan
from fleetpipe.profiling.candidates import PlanTask
from fleetpipe.schedules import Placement
from tests.profiling.test_profile import big_vocabulary, uneven, whole_only


def optimum(profile: Profile, ranks: int, micro_batches: int, known: float) -> float:
    """Returns the least makespan of any cut and order, given one that is ``known`` to exist."""
    task = PlanTask(profile, ranks, micro_batches, math.inf, frozenset(), 0)
    best = known
    count = len(profile.layers)
    for inner in itertools.combinations(profile.cuts, ranks - 1):
        stages = task.stages.cut((0, *inner, count))
        comm = task.comm(Placement("loop", ranks), stages)
        work = max(stage.forward + _back(stage) for stage in stages)
        if micro_batches * work < best:
            best = min(best, _least_makespan(stages, comm, micro_batches, best))
    return best


def _back(stage: StageCost) -> float:
    return stage.input_grad + stage.weight_grad or stage.backward


def _least_makespan(
    stages: Sequence[StageCost], comm: Sequence[float], m: int, known: float
) -> float:
    """Returns the least makespan of a cut; ``known`` where it is not below that."""
    import highspy

    # In shares of what is known: then tolerances mean the same for every case.
    durations = [
        {"F": s.forward / known, "I": s.input_grad / known, "W": s.weight_grad / known}
        if s.input_grad
        else {"F": s.forward / known, "I": s.backward / known}
        for s in stages
    ]
    solver = highspy.Highs()
    for option, value in (("output_flag", False), ("threads", 1)):
        solver.setOptionValue(option, value)
    starts: dict[tuple[str, int, int], Any] = {
        (kind, s, k): solver.addVariable(0, 1)
        for s, own in enumerate(durations)
        for kind in own
        for k in range(m)
    }
    makespan = solver.addVariable(0, 1)

    def after(one: tuple[str, int, int], other: tuple[str, int, int], latency: float = 0) -> None:
        kind, stage, _ = other
        length = durations[stage][kind] + latency / known
        solver.addConstr(starts[one] >= starts[other] + length)

    for s, own in enumerate(durations):
        for k in range(m):
            if s:
                after(("F", s, k), ("F", s - 1, k), comm[s - 1])
                after(("I", s - 1, k), ("I", s, k), comm[s - 1])
            after(("I", s, k), ("F", s, k))
            if "W" in own:
                after(("W", s, k), ("I", s, k))
            for kind in own:
                solver.addConstr(makespan >= starts[kind, s, k] + own[kind])
                if k:
                    after((kind, s, k), (kind, s, k - 1))
        for kinds in itertools.combinations(own, 2):
            _one_at_a_time(solver, {kind: own[kind] for kind in kinds}, starts, s, m)
    solver.minimize(makespan)
    status = solver.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        return known
    assert status == highspy.HighsModelStatus.kOptimal, status
    return float(solver.getObjectiveValue()) * known


def _one_at_a_time(solver: Any, own: dict[str, float], starts: Any, s: int, m: int) -> None:
    """Has a rank not compute two actions of two kinds at once."""
    early, late = own
    first: dict[tuple[int, int], Any] = {}
    for i in range(m):
        for j in range(i):
            # The later micro-batch's earlier kind, before the earlier one's later kind or after it.
            choice = first[i, j] = solver.addBinary()
            one, other = starts[early, s, i], starts[late, s, j]
            solver.addConstr(other >= one + own[early] - 2 * (1 - choice))
            solver.addConstr(one >= other + own[late] - 2 * choice)
    for (i, j), choice in first.items():
        if (i - 1, j) in first:
            solver.addConstr(choice <= first[i - 1, j])
        if (i, j + 1) in first:
            solver.addConstr(choice <= first[i, j + 1])


pytest.importorskip("highspy", reason="the exact optimum needs highspy, of the extra `test`")

CASES = [
    (uneven(6), 2, 4),
    (uneven(6), 3, 4),
    (uneven(6, 2), 4, 4),
    (whole_only(uneven(6)), 3, 4),
    (whole_only(big_vocabulary(5)), 3, 6),
    (whole_only(uneven(6, 1)), 4, 6),
]


@pytest.mark.parametrize(("profile", "ranks", "micro_batches"), CASES)
def test_a_plan_is_close_to_the_optimum(profile: Profile, ranks: int, micro_batches: int) -> None:
    made = plan(profile, ranks, micro_batches, search=("partition", "schedule"))
    found = made.predicted.time
    least = optimum(profile, ranks, micro_batches, found)
    # The bound is one, and the plan is a plan; of these the worst is off by 5.1 %.
    assert made.bound <= least * (1 + 1e-6)
    assert found <= 1.06 * least
