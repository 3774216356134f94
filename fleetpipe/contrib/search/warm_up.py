"""Orders with one stage on each rank: some forwards to warm up, then I and F in turn."""

from __future__ import annotations

import itertools

from fleetpipe.contrib.search.problem import Problem

#: Forwards that each rank runs before its first I.
WarmUp = tuple[int, ...]

#: Forwards that a rank runs beyond those that fit before its first I, in times of a forward.
_SLACKS = tuple(quarters / 4 for quarters in range(9))


def warm_up_order(problem: Problem, warm_up: WarmUp) -> list[list[int]]:
    """Returns the order of F and I in which rank r begins with ``warm_up[r]`` forwards."""
    width, stages = problem.width, problem.placement.stages
    rows = []
    for stage, first in enumerate(warm_up):
        forwards = [k * width + stage for k in range(problem.micro_batches)]
        input_grads = [code + stages for code in forwards]
        row = forwards[:first]
        for input_grad, forward in zip(input_grads, forwards[first:]):
            row += (input_grad, forward)
        rows.append(row + input_grads[len(forwards) - first :])
    return rows


def most_forwards(problem: Problem) -> list[int]:
    """Returns for each rank the number of forwards that it may hold, at most m."""
    return [
        int(min(problem.micro_batches, problem.cap / amount if amount else problem.micro_batches))
        for amount in problem.amounts
    ]


def is_allowed(warm_up: WarmUp, most: list[int]) -> bool:
    """Whether each rank warms up within its memory, and no longer than the rank that feeds it."""
    return all(1 <= first <= limit for first, limit in zip(warm_up, most)) and all(
        earlier >= later for earlier, later in itertools.pairwise(warm_up)
    )


def warm_ups(problem: Problem) -> list[WarmUp]:
    """Returns the first warm-ups to try, each once.

    They fill the time until the first I comes back, with more or less slack, with or without a last
    forward that delays it; others are those of 1F1B, ZBH1 and ZBH2.
    """
    ranks, most = problem.placement.ranks, most_forwards(problem)
    candidates = [_fill(problem, most, slack, late) for slack in _SLACKS for late in (False, True)]
    candidates += [tuple(k * (ranks - 1 - rank) + 1 for rank in range(ranks)) for k in (1, 2)]
    return list(dict.fromkeys(_fit(warm_up, most) for warm_up in candidates))


def _fill(problem: Problem, most: list[int], slack: float, late: bool) -> WarmUp:
    """Returns the warm-up that fills the time until the first I comes back.

    Args:
        problem: The costs.
        most: For each rank how many forwards it may hold.
        slack: Time to fill beyond that, in times of a forward.
        late: Whether the last forward may delay the first I, rather than leave a gap before it.
    """
    stages, comm_of = problem.placement.stages, problem.costs.comm_of
    forwards, input_grads = problem.durations[:stages], problem.durations[stages : 2 * stages]
    begins = [sum(forwards[:stage]) + sum(map(comm_of, range(stage))) for stage in range(stages)]
    warm_up = [1]
    ended = begins[-1] + forwards[-1] + input_grads[-1]
    for stage in reversed(range(stages - 1)):
        arrival = ended + comm_of(stage)
        gap = arrival - begins[stage]
        fitting = gap / forwards[stage] if forwards[stage] else warm_up[0]
        # A hair of rounding must not cost a forward, nor add one.
        first = int(fitting + slack + (1 - 1e-6 if late else 1e-6))
        warm_up.insert(0, min(max(first, warm_up[0] + 1), most[stage]))
        ended = max(arrival, begins[stage] + warm_up[0] * forwards[stage]) + input_grads[stage]
    return tuple(warm_up)


def _fit(warm_up: WarmUp, most: list[int]) -> WarmUp:
    """Reduces a warm-up to the allowed one."""
    fitted: list[int] = []
    for first, limit in zip(warm_up, most):
        fitted.append(min(first, limit, *fitted[-1:]))
    return tuple(fitted)
