"""The schedule named auto: the best one that a greedy search finds under a memory cap.

The search tries orders of F and I, and positions for W in them; ``orders.py`` makes both. Start
with ``auto``.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from fleetpipe.contrib.search.orders import (
    Policy,
    Preference,
    Problem,
    WarmUp,
    fill,
    is_allowed,
    listed_order,
    most_forwards,
    warm_up_order,
    warm_ups,
)
from fleetpipe.errors import ConfigError, require_whole
from fleetpipe.schedules.costs import Costs
from fleetpipe.schedules.families.table import FAMILIES, SLICED, schedule_rows
from fleetpipe.schedules.families.variants import counts, variants
from fleetpipe.schedules.placement import SHAPES, Placement
from fleetpipe.schedules.rows import ScheduleRows
from fleetpipe.schedules.simulation import simulate

#: The fields of each ``Preference`` that is tried.
_FLAGS = tuple(itertools.product((False, True), repeat=2))

#: The most actions that a search simulates, which bounds its time.
_BUDGET = 8_000_000


class _Score(NamedTuple):
    """The rank of a schedule, smaller is better; times are rounded to shares of the work."""

    span: float
    makespan: float
    spans: float


class _Candidate(NamedTuple):
    """A schedule with its score: a family's own, or rows of codes that the search composed."""

    score: _Score
    problem: Problem
    made: ScheduleRows | list[list[int]]
    warm_up: WarmUp = ()
    policy: Policy = Policy()


def auto(
    placement: Placement,
    micro_batches: int,
    memory_cap: float | None = None,
    costs: Costs | None = None,
    placed: str | None = None,
    slices: int | None = None,
) -> ScheduleRows:
    """Finds a schedule with a short span; of several equal ones, that with the least makespan.

    Args:
        placement: Ranks and chunks.
        micro_batches: Micro-batches of a batch, m.
        memory_cap: Most that any rank may hold: forwards of one stage, or bytes if ``costs`` gives
            bytes, as ``Timeline.peak_activations`` and ``.peak_bytes`` count them. None means no
            limit.
        costs: The costs of actions, latency included, and the share that I releases. Default
            ``Costs()``.
        placed: "loop", "vee" or "wave", for stages that exist already. By default a loop is tried,
            with two chunks also a vee, and with 4, 6, .. chunks a wave.
        slices: Most slices that each sequence may be cut into, with one chunk on a rank. None for
            the number in ``costs.each_slice``, or none. Without ``costs.each_slice`` all slices
            cost the same.

    Raises:
        ConfigError: The cap does not let a single micro-batch pass (the message says what would),
            or the costs do not fit the number of stages.
    """
    costs = _check(memory_cap, costs)
    costs.check_stages(placement.stages)
    cap = math.inf if memory_cap is None else memory_cap
    search = _Search()
    possible = [name for name, shape in SHAPES.items() if shape.takes(placement.chunks)]
    if placed is not None and placed not in possible:
        raise ConfigError(
            f"{placement.chunks} chunks on each rank cannot be placed like that",
            expected=" or ".join(possible),
            got=f"placed={placed!r}",
            fix=f"give placed={possible[0]!r}, or leave it out",
        )
    # A wave of two chunks is a vee.
    tried = possible[:2] if placed is None else (placed,)
    parts = _parts(costs, slices)
    for name in tried:
        standing = Placement(name, placement.ranks, placement.chunks)
        problem = Problem(standing, micro_batches, costs, cap)
        problem.check_cap()
        search.run(problem)
        if standing.stages == standing.ranks:
            search.cut(problem, parts)
    return search.result()


def _parts(costs: Costs, slices: int | None) -> list[int]:
    """Returns the numbers of slices to try."""
    if slices is not None:
        require_whole("slices", slices)
    if costs.each_slice is None:
        return counts(slices or 1)
    number = len(costs.each_slice)
    return [number] if 1 < number <= (slices or number) else []


def _check(memory_cap: object, costs: object) -> Costs:
    number = isinstance(memory_cap, (int, float)) and not isinstance(memory_cap, bool)
    if not number and memory_cap is not None:
        raise ConfigError(
            "`memory_cap` must be a number",
            got=repr(memory_cap),
            fix="give a number such as 4, or leave it out",
        )
    if not isinstance(costs, Costs) and costs is not None:
        raise ConfigError("`costs` must be Costs", got=repr(costs), fix="Costs.from_json(text)")
    return costs or Costs()


class _Search:
    """The best schedule so far, and the number of actions that may still be simulated."""

    def __init__(self) -> None:
        self.best: _Candidate | None = None
        self.left = _BUDGET

    def run(self, problem: Problem) -> None:
        """Tries the families' schedules, then composed orders, then changes of the best one."""
        # The first order keeps within every cap, so that there is a result.
        orders = [listed_order(problem, Preference(*flags)) for flags in _FLAGS]
        for schedule in _families(problem):
            self._try_family(problem, schedule)
            orders.append(problem.order_of(schedule))
        starts = warm_ups(problem) if problem.placement.chunks == 1 else []
        policies = _policies(problem, self.left, len(orders) + len(starts))
        for order in orders:
            self._try_order(problem, order, policies)
        for warm_up in starts:
            self._try_order(problem, warm_up_order(problem, warm_up), policies, warm_up)
        if starts:
            self._climb(problem)

    def cut(self, problem: Problem, parts: Iterable[int]) -> None:
        """Tries Seq1F1B with each of these numbers of slices."""
        placement, costs = problem.placement, problem.costs
        for slices in parts:
            schedule = schedule_rows(
                SLICED, placement.ranks, problem.micro_batches, None, {"slices": slices}
            )
            slice_costs = costs.parted([1] * slices) if costs.each_slice is None else costs
            self._try_family(problem, schedule, slice_costs)

    def result(self) -> ScheduleRows:
        """Returns the best schedule."""
        if self.best is None:
            raise AssertionError("a listed order keeps within every cap that is not refused")
        problem, made = self.best.problem, self.best.made
        if isinstance(made, ScheduleRows):
            return dataclasses.replace(made, name="auto")
        return problem.schedule_of("auto", made)

    def _try_family(
        self, problem: Problem, schedule: ScheduleRows, costs: Costs | None = None
    ) -> None:
        timeline = simulate(schedule, costs or problem.costs)
        if problem.holds(timeline):
            score = _score(problem, timeline.spans, timeline.makespan)
            self._keep(_Candidate(score, problem, schedule))

    def _try_order(
        self,
        problem: Problem,
        order: list[list[int]],
        policies: Iterable[tuple[float, int]],
        warm_up: WarmUp = (),
    ) -> None:
        for share, tail in policies:
            policy = Policy(share * self._idle(problem), tail)
            if not self._try(problem, order, policy, warm_up):
                return

    def _try(
        self, problem: Problem, order: list[list[int]], policy: Policy, warm_up: WarmUp
    ) -> bool:
        """Adds W to an order and keeps the result if it is best; False if the budget is used up."""
        if self.left <= 0 or self._at_bound(problem):
            return False
        self.left -= problem.length
        longest = math.inf if self.best is None else self.best.score.span * _unit(problem)
        filled = fill(problem, order, policy, longest * (1 + 1e-9))
        if filled is not None:
            score = _score(problem, filled.spans, filled.makespan)
            self._keep(_Candidate(score, problem, filled.rows, warm_up, policy))
        return True

    def _keep(self, candidate: _Candidate) -> None:
        if self.best is None or candidate.score < self.best.score:
            self.best = candidate

    def _climb(self, problem: Problem) -> None:
        """Changes the warm-up of one rank at a time, as long as that helps."""
        most = most_forwards(problem)
        before = None
        while self.best is not None and self.best.warm_up and self.best is not before:
            before = self.best
            for rank, step in itertools.product(range(problem.placement.ranks), (-1, 1)):
                best = self.best
                moved = list(best.warm_up)
                moved[rank] += step
                warm_up = tuple(moved)
                if not is_allowed(warm_up, most):
                    continue
                order = warm_up_order(problem, warm_up)
                for patience in dict.fromkeys((best.policy.patience, self._idle(problem))):
                    self._try(problem, order, Policy(patience, best.policy.tail), warm_up)

    def _idle(self, problem: Problem) -> float:
        """Returns how long a rank may wait while the span stays below the best one so far."""
        if self.best is None:
            return 0
        return max(0, self.best.score.span * _unit(problem) - max(problem.work))

    def _at_bound(self, problem: Problem) -> bool:
        return self.best is not None and self.best.score.span * _unit(problem) <= problem.bound * (
            1 + 1e-9
        )


def _policies(problem: Problem, budget: int, orders: int) -> list[tuple[float, int]]:
    """Returns the policies to try: patience, as a share of the idle time so far, and tail.

    There are fewer if they would take too long to simulate.
    """
    ranks = problem.placement.ranks
    half = ranks // 2
    pairs = [(0, 0), (0, half), (0, 2 * ranks), (0.5, half), (1, 0), (0.5, 0), (1, ranks)]
    return pairs[: max(1, budget // (orders * problem.length))]


def _families(problem: Problem) -> Iterator[ScheduleRows]:
    """Yields the families' schedules for the placement of a problem."""
    placement = problem.placement
    stands = [placement.rank_of(stage) for stage in range(placement.stages)]
    for name, family in FAMILIES.items():
        if family.sliced:
            continue
        for options in variants(name, problem.micro_batches, problem.hidden):
            try:
                native = Placement(family.placement, placement.ranks, placement.chunks)
                if stands != list(map(native.rank_of, range(native.stages))):
                    continue
                schedule = schedule_rows(
                    name, placement.ranks, problem.micro_batches, placement.chunks, options
                )
            except ConfigError:  # the family does not take these numbers
                continue
            # A wave of two chunks is a vee.
            yield dataclasses.replace(schedule, placement=placement)


def _unit(problem: Problem) -> float:
    """Returns the unit of scores: the mean work of a rank, the same for all placements."""
    return sum(problem.work) / len(problem.work) or 1


def _score(problem: Problem, spans: Iterable[float], makespan: float) -> _Score:
    unit, spans = _unit(problem), tuple(spans)
    return _Score(*(round(time / unit, 9) for time in (max(spans), makespan, sum(spans))))
