"""Adds a vocabulary head, with one part on each rank, to the rows of a schedule.

1F1B on two ranks, four micro-batches, a part as long as a stage. Small letters are of the head: of
rank 0 stage 2, of rank 1 stage 3. Stage 4, the loss, stands between f and b and takes no time::

    rank 0  F0 F1 f0 F2 b0--- F3 f1 f2 b1--- b2--- .  .  B0--- f3 .  B1--- b3--- B2--- B3---
    rank 1  .  F0 f0 b0--- F1 f1 F2 b1--- f2 b2--- B0--- F3 f3 B1--- b3--- B2--- B3--- .  .
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from fleetpipe.schedules.action import Action, Item, parts
from fleetpipe.schedules.edges import Dependencies, Edge
from fleetpipe.schedules.placement import Placement

#: Forwards that each rank runs ahead: the body's rows are those of a pipeline with as many more
#: stages, since a micro-batch goes to all ranks and back between the last stage's F and B, twice
#: (arXiv:2411.05288).
AHEAD = 2

#: Nominal times of a stage, and how long parts and the loss are beside it. Longer parts give the
#: same order, for what a micro-batch needs of a head comes before the body's own actions; shorter
#: ones do not.
_TIMES = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
_PART, _LOSS = 0.2, 0.01


def with_head(
    body: Sequence[Sequence[Item]], placement: Placement, micro_batches: int
) -> list[list[Item]]:
    """Returns the rows of a body with the forwards and backwards of a head added.

    The body's order stays. A part's actions run as soon as their inputs are there and their rank is
    free, so they fill its bubbles first.

    Args:
        body: The rows of the body, which wait for each other along a chain of stages.
        placement: The placement of body and head.
        micro_batches: Micro-batches of a batch, m.
    """
    return _Merge(body, placement, micro_batches).rows()


class _Merge:
    """The times of what has run, and the actions that are left."""

    def __init__(
        self, body: Sequence[Sequence[Item]], placement: Placement, micro_batches: int
    ) -> None:
        edges = [Edge(*ends) for ends in placement.chain()]
        self.dependencies = Dependencies(edges, placement.stages)
        self.lengths = [1.0] * placement.body + [_PART] * placement.ranks + [_LOSS]
        self.clock = [0.0] * placement.ranks
        self.ends: dict[tuple[str, int, int], float] = {}
        # By rank: rows of which each keeps its order, what goes first where both could run first.
        self.queues: list[list[deque[Item]]] = []
        for rank, row in enumerate(body):
            head = [stage for stage in placement.stages_of(rank) if stage >= placement.body][::-1]
            kinds = [(kind, stage) for kind in "BF" for stage in head]
            rows = [*([Action(*kind, k) for k in range(micro_batches)] for kind in kinds), row]
            self.queues.append([deque[Item](one) for one in rows])

    def rows(self) -> list[list[Item]]:
        """Runs whatever can begin first, again and again, and returns the rows."""
        rows: list[list[Item]] = [[] for _ in self.queues]
        while possible := [
            (start, number, rank)
            for rank, queues in enumerate(self.queues)
            for number, queue in enumerate(queues)
            if queue and (start := self._start(rank, queue[0])) < math.inf
        ]:
            start, number, rank = min(possible)
            item = self.queues[rank][number].popleft()
            rows[rank].append(item)
            self._run(rank, item, start)
        return rows

    def _start(self, rank: int, item: Item) -> float:
        """Returns when an entry could begin; infinity if its inputs have not been computed."""
        needs = [
            self.ends.get((kind, stage, action.micro_batch), math.inf)
            for action in parts(item)
            for kind, stage in self.dependencies.of(action.kind, action.stage)
        ]
        return max([self.clock[rank], *needs])

    def _run(self, rank: int, item: Item, start: float) -> None:
        actions = parts(item)
        times = [_TIMES[action.kind] * self.lengths[action.stage] for action in actions]
        self.clock[rank] = start + sum(times)
        for kind, stage, micro_batch in actions:
            self.ends["B" if kind == "I" else kind, stage, micro_batch] = self.clock[rank]
