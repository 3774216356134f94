"""Inserts W into a given order of F and I: when a rank would wait, or must free memory.

Times run to the right; the rank waits for F4, so it runs a W first (v), and another one that delays
F4 a little if the rank has waited enough already (!)::

    before   F3 I2 .......F4          patience 2         F3 I2 W0 W1 .F4
    after    F3 I2 W0 v.. F4          patience 0         F3 I2 W0 W1 W2 F4 !
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from fleetpipe.contrib.search.problem import Problem


class Policy(NamedTuple):
    """Says when a rank waits although it could compute a W.

    Args:
        patience: Total time that a rank may wait before it delays its next action instead.
        tail: Number of the last F and I of each rank that no W may delay.
    """

    patience: float = 0
    tail: int = 0


class Filled(NamedTuple):
    """An order of F and I with W inserted.

    Args:
        rows: Codes of each rank; see :class:`Problem`.
        spans: For each rank the time from its first begin to its last end.
        makespan: From time 0 to the last end of any rank.
    """

    rows: list[list[int]]
    spans: list[float]
    makespan: float


def fill(
    problem: Problem, order: list[list[int]], policy: Policy, longest: float = math.inf
) -> Filled | None:
    """Inserts the W into an order of F and I; each rank runs them in the order of its I.

    Every rank uses only its own state, so the result does not depend on the order in which ranks
    are visited.

    Args:
        problem: Costs and memory.
        order: For each rank the codes of all its F and I.
        policy: When to wait.
        longest: Give up once a rank's span would be longer than this.

    Returns:
        None if the order deadlocks, exceeds the memory cap or takes too long.
    """
    filler = _Filler(problem, order, policy, longest)
    return filler.result() if filler.run() else None


class _Filler:
    """The state of each rank: its position, the memory it holds, and the time it has waited."""

    def __init__(
        self, problem: Problem, order: list[list[int]], policy: Policy, longest: float
    ) -> None:
        ranks = range(len(order))
        self.problem, self.order, self.policy = problem, order, policy
        self.rest = 1 - problem.costs.input_grad_frees
        self.limits = [longest - work for work in problem.work]
        self.finished: list[float] = [-1] * (problem.width * problem.micro_batches)
        self.reached = [0 for _ in ranks]
        self.begins: list[float] = [0 for _ in ranks]
        self.clocks: list[float] = [0 for _ in ranks]
        self.waited: list[float] = [0 for _ in ranks]
        # Forwards of which nothing is released, and those whose I is done: see
        # `amounts_in_flight`.
        self.whole: list[float] = [0 for _ in ranks]
        self.halves: list[float] = [0 for _ in ranks]
        self.pending: list[deque[int]] = [deque() for _ in ranks]
        self.rows: list[list[int]] = [[] for _ in ranks]

    def run(self) -> bool:
        """Runs every rank to the end of its order; False if that is impossible."""
        ready = list(range(len(self.order)))
        while ready:
            if not self._advance(ready.pop(), ready):
                return False
        return self.reached == [len(row) for row in self.order]

    def _advance(self, rank: int, ready: list[int]) -> bool:
        """Runs one rank until it lacks an input; False if it cannot go on at all."""
        problem, order, row = self.problem, self.order[rank], self.rows[rank]
        width, stages, cap = problem.width, problem.placement.stages, problem.cap
        waits, durations, amounts = problem.waits, problem.durations, problem.amounts
        followers, finished, pending = problem.followers, self.finished, self.pending[rank]
        for position in range(self.reached[rank], len(order)):
            code = order[position]
            column = code % width
            distance, delay = waits[column]
            ended = finished[code + distance] if distance else 0
            if ended < 0:
                return True
            arrival = ended + delay
            amount = amounts[column % stages]
            if column < stages:
                held = self.whole[rank] + amount + self.rest * self.halves[rank]
                if held > cap and not self._make_room(rank, amount):
                    return False
            if arrival > self.clocks[rank] and not self._wait(rank, arrival, position):
                return False
            row.append(code)
            self.clocks[rank] = finished[code] = self.clocks[rank] + durations[column]
            self.reached[rank] = position + 1
            if column < stages:
                self.whole[rank] += amount
            else:
                self.whole[rank] -= amount
                self.halves[rank] += amount
                pending.append(code + stages)
            if followers[column] >= 0:
                ready.append(followers[column])
        return True

    def _make_room(self, rank: int, amount: float) -> bool:
        """Runs W until a forward fits into memory; False if no W is left."""
        while self.whole[rank] + amount + self.rest * self.halves[rank] > self.problem.cap:
            if not self.pending[rank]:
                return False
            self._weight_grad(rank)
        return True

    def _wait(self, rank: int, arrival: float, position: int) -> bool:
        """Runs W during a wait, or just waits; False if the rank has waited too long."""
        if not self.rows[rank]:
            self.begins[rank] = self.clocks[rank] = arrival
            return True
        pending, durations, width = self.pending[rank], self.problem.durations, self.problem.width
        while pending and self.clocks[rank] + durations[pending[0] % width] <= arrival:
            self._weight_grad(rank)
        gap = arrival - self.clocks[rank]
        if gap <= 0:
            return True
        calm = position >= len(self.order[rank]) - self.policy.tail
        if pending and not calm and self.waited[rank] + gap > self.policy.patience:
            self._weight_grad(rank)
            return True
        self.waited[rank] += gap
        self.clocks[rank] = arrival
        return self.waited[rank] <= self.limits[rank]

    def _weight_grad(self, rank: int) -> None:
        code = self.pending[rank].popleft()
        column = code % self.problem.width
        self.rows[rank].append(code)
        self.clocks[rank] += self.problem.durations[column]
        self.halves[rank] -= self.problem.amounts[column % self.problem.placement.stages]

    def result(self) -> Filled:
        """Returns the result, with pending W at the end of each rank's row."""
        for rank, pending in enumerate(self.pending):
            while pending:
                self._weight_grad(rank)
        spans = [clock - begin for clock, begin in zip(self.clocks, self.begins)]
        return Filled(self.rows, spans, max(self.clocks))
