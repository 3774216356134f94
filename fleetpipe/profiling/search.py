"""Searches for the plan with the least time: partition, placement, schedule and recompute.

As in AdaPtis (arXiv:2509.23722) each is improved in turn until nothing helps: first cuts are tried
with the schedules of all families, the best ones are moved layer by layer, a schedule is searched
for the resulting cut, and the cut is moved again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from fleetpipe.profiling.candidates import Boundaries, Candidate, Lack, PlanTask
from fleetpipe.schedules import Schedule

#: Actions that are played in all, which bounds the time whatever the size: some seconds.
_BUDGET = 1_500_000

#: Shapes whose best plan is improved.
_IMPROVED = 3

#: How often a schedule is searched for a cut that was moved for the one before.
_ROUNDS = 3

#: Times that differ by less are as good as equal: two profiles of one model differ by as much.
_NOISE = 0.01

#: Steps by which a part of the borders between stages moves at once.
_STEPS = (1, -1, 2, -2, 4, -4)

Outcome = Candidate | Lack


class _Score(NamedTuple):
    """The rank of a plan, smaller is better: first whether it fits, then how fast it is."""

    lack: float
    seconds: float
    peak: int = 0


def best_plan(task: PlanTask) -> Outcome:
    """Returns the best plan found; if none fits, the one that lacks the least memory."""
    return _Search(task).run()


class _Search:
    """A task, and the number of actions that may still be simulated for it."""

    def __init__(self, task: PlanTask) -> None:
        self.task = task
        self.left = _BUDGET
        self.fitting: list[Candidate] = []
        # Against rounding: times count in shares of the work.
        self.unit = task.micro_batches * task.stages.least() / task.ranks or 1

    def run(self) -> Outcome:
        """Tries all shapes, and improves the best candidates."""
        firsts = []
        for shape in self.task.shapes():
            cuts = self.task.cuts(shape)
            outcomes = [self._try(s, cut) for s in self.task.schedules(shape) for cut in cuts]
            # With the best cut of a family, what a search makes of it.
            outcomes += [self._with_schedule(one) for one in sorted(outcomes, key=self._score)[:1]]
            firsts += sorted(outcomes, key=self._score)[:1]
        firsts.sort(key=self._score)
        best = min((self._improve(first) for first in firsts[:_IMPROVED]), key=self._score)
        return best if isinstance(best, Lack) else self._with_least_memory(best)

    def _with_least_memory(self, best: Candidate) -> Candidate:
        """Returns the plan of the smallest peak among those that are as fast within the noise."""
        longest = best.seconds * (1 + _NOISE)
        fast = [one for one in self.fitting if one.seconds <= longest]
        return min([best, *fast], key=lambda one: (one.peak, one.seconds))

    def _try(self, schedule: Schedule, boundaries: Boundaries) -> Outcome:
        self.left -= sum(map(len, schedule.actions))
        outcome = self.task.evaluate(schedule, boundaries)
        if isinstance(outcome, Candidate):
            self.fitting.append(outcome)
        return outcome

    def _score(self, candidate: Outcome) -> _Score:
        if isinstance(candidate, Lack):
            return _Score(candidate.peak, math.inf)
        return _Score(0, round(candidate.seconds / self.unit, 9), candidate.peak)

    def _improve(self, first: Outcome) -> Outcome:
        """Moves the cut and searches a schedule in turn, as long as that helps."""
        best = self._move_cut(first)
        for _ in range(_ROUNDS):
            better = self._with_schedule(best)
            if self._score(better) >= self._score(best):
                break
            best = self._move_cut(better)
        return best

    def _with_schedule(self, candidate: Outcome) -> Outcome:
        """Returns the better of a plan and of the same cut with a searched schedule."""
        if isinstance(candidate, Lack) or self.left <= 0:
            return candidate
        schedule = self.task.search_schedule(candidate)
        if schedule is None:
            return candidate
        return min(candidate, self._try(schedule, candidate.boundaries), key=self._score)

    def _move_cut(self, candidate: Outcome) -> Outcome:
        """Moves the cut under its present schedule: one border, or neighbouring ones together."""
        if "partition" not in self.task.search:
            return candidate
        best, before = candidate, None
        while best is not before:
            before = best
            for boundaries in self._moves(best.boundaries):
                if self.left <= 0:
                    return best
                tried = self._try(best.schedule, boundaries)
                if self._score(tried) < self._score(best):
                    best = tried
                    break
        return best

    def _moves(self, boundaries: Boundaries) -> Iterator[Boundaries]:
        """Yields cuts with some neighbouring borders moved by the same number of possible cuts."""
        cuts = self.task.profile.cuts
        index = {cut: number for number, cut in enumerate(cuts)}
        # The parts of a head stay where they are.
        last = next(n for n in range(1, len(boundaries)) if boundaries[n] not in index)
        inner = [index[border] for border in boundaries[1:last]]
        for width in range(1, len(inner) + 1):
            for first in range(len(inner) - width + 1):
                for step in _STEPS:
                    moved = list(inner)
                    for number in range(first, first + width):
                        moved[number] += step
                    if not moved[first] >= 0 or not moved[first + width - 1] < len(cuts):
                        continue
                    if all(one < after for one, after in itertools.pairwise(moved)):
                        yield (0, *(cuts[number] for number in moved), *boundaries[last:])
