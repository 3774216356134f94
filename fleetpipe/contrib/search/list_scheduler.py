"""Finds an order of F and I on any placement: each free rank takes the best ready action.

A rank may hold as much as the cap allows, minus the memory that its oldest begun micro-batch still
needs to reach the rank's last stage. So the oldest can always go on, and no action has to be
undone.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import NamedTuple

from fleetpipe.contrib.search.problem import Problem


class Preference(NamedTuple):
    """Says which action a rank takes if several are ready.

    Args:
        alternate: An F after an I and an I after an F; else always the I.
        shallow: The F of its first stage; else that of its last.
    """

    alternate: bool = False
    shallow: bool = False


def listed_order(problem: Problem, preference: Preference) -> list[list[int]]:
    """Returns the codes of each rank's F and I in an order that keeps within the cap."""
    lister = _Lister(problem, preference)
    lister.run()
    return lister.rows


class _Lister:
    """The clock of all ranks: the values that have arrived, and the memory each rank holds."""

    def __init__(self, problem: Problem, preference: Preference) -> None:
        ranks = range(problem.placement.ranks)
        self.problem, self.preference = problem, preference
        self.owned = [problem.placement.stages_of(rank) for rank in ranks]
        self.rest = 1 - problem.costs.input_grad_frees
        columns = 2 * problem.placement.stages
        # For each column of F and I: the next micro-batch, and when each one's input arrived.
        self.next = [0] * columns
        self.arrivals: list[list[float]] = [[] for _ in range(columns)]
        self.arrivals[0] = [0] * problem.micro_batches
        self.clocks: list[float] = [0 for _ in ranks]
        self.last_was_forward = [False for _ in ranks]
        self.whole: list[float] = [0 for _ in ranks]
        self.halves: list[float] = [0 for _ in ranks]
        self.pending: list[deque[int]] = [deque() for _ in ranks]
        self.rows: list[list[int]] = [[] for _ in ranks]
        self.events: list[tuple[float, int]] = [(0, rank) for rank in ranks]

    def run(self) -> None:
        """Handles events until all actions are done: a rank becomes free, or a value arrives."""
        while self.events:
            now, rank = heapq.heappop(self.events)
            if now >= self.clocks[rank]:
                self._act(rank, now)

    def _act(self, rank: int, now: float) -> None:
        """Starts the preferred action of a free rank, else a W, else nothing."""
        column = self._choice(rank, now)
        stages = self.problem.placement.stages
        if column is None:
            if not self.pending[rank]:
                return
            stage = self.pending[rank].popleft()
            self.halves[rank] -= self.problem.amounts[stage]
            end = now + self.problem.durations[2 * stages + stage]
        else:
            end = now + self.problem.durations[column]
            self._begin(rank, column, end)
        self.clocks[rank] = end
        heapq.heappush(self.events, (end, rank))

    def _begin(self, rank: int, column: int, end: float) -> None:
        """Starts the next F or I of a column, and schedules the arrival of its value."""
        problem, stages = self.problem, self.problem.placement.stages
        amount = problem.amounts[column % stages]
        self.rows[rank].append(self.next[column] * problem.width + column)
        self.next[column] += 1
        self.last_was_forward[rank] = column < stages
        if column < stages:
            self.whole[rank] += amount
        else:
            self.whole[rank] -= amount
            self.halves[rank] += amount
            self.pending[rank].append(column - stages)
        if column == stages:  # I of stage 0 has nobody to tell
            return
        step = stages if column == stages - 1 else 1 if column < stages else -1
        arrival = end + problem.waits[column + step][1]
        self.arrivals[column + step].append(arrival)
        if problem.followers[column] >= 0:
            heapq.heappush(self.events, (arrival, problem.followers[column]))

    def _choice(self, rank: int, now: float) -> int | None:
        """Returns the column of the best ready action; None if none is ready."""
        stages, owned = self.problem.placement.stages, self.owned[rank]
        input_grads = [s + stages for s in owned if self._has_arrived(s + stages, now)]
        forwards = [s for s in owned if self._has_arrived(s, now) and self._fits(rank, s)]
        if not input_grads or (forwards and self._forward_first(rank)):
            best = min if self.preference.shallow else max
            return best(forwards, default=None)
        # The oldest micro-batch first; of one micro-batch the deepest stage.
        return min(input_grads, key=lambda column: (self.next[column], -column))

    def _forward_first(self, rank: int) -> bool:
        return self.preference.alternate and not self.last_was_forward[rank]

    def _has_arrived(self, column: int, now: float) -> bool:
        arrivals, following = self.arrivals[column], self.next[column]
        return following < len(arrivals) and arrivals[following] <= now

    def _fits(self, rank: int, stage: int) -> bool:
        """Whether a forward fits beside the memory that the oldest micro-batch will still need."""
        amounts, owned = self.problem.amounts, self.owned[rank]
        oldest = self.next[owned[-1]]
        needed = sum(amounts[other] for other in owned if self.next[other] <= oldest)
        if self.next[stage] > oldest:
            needed += amounts[stage]
        held = self.whole[rank] + self.rest * self.halves[rank]
        return held + needed <= self.problem.cap
