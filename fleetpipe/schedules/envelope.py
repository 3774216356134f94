"""Which entries of its row a rank may run early, and why no order of arrivals can block the ranks.

A rank that runs early entries takes the first entry that is *ready*, one whose inputs have come,
instead of waiting for the next entry of its row. Three rules limit which entries may run early:

- *Dependencies.* An entry comes after those of its own rank that it needs.
- *Lanes.* Forwards of a stage keep the order of the row, and so do the actions that add to its
  parameters' gradients: B and I, and B and W. So random streams, running statistics and sums of
  gradients are those of the row, in every bit. Stages of a rank that share a tensor share lanes.
- *Memory.* An entry runs early only if the rank can then run the rest of its row in order without
  holding more than its cap.

Proof that the ranks never block. Put the entries of all ranks into one order in which the schedule
can run as it is written, and consider the first entry that has not run. All entries before it have
run, so it is the head of its rank's row, and its inputs have been sent: dependencies and lanes let
it run. Memory does, too: at the start a rank can run its row in order, as the schedule was
verified; an early entry runs only if that stays so; and the head is the next entry in that order.
So some rank can always run an entry, however late messages are, and each entry runs once.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import TypeVar

from fleetpipe.representation import shows
from fleetpipe.schedules.action import Action, flatten, parts
from fleetpipe.schedules.costs import Costs
from fleetpipe.schedules.placement import (
    Dependencies,
    Edge,
    checked_edges,
    distance_to_slice_before,
)
from fleetpipe.schedules.rows import ScheduleRows
from fleetpipe.schedules.simulation import amounts_in_flight

#: The lanes of each kind of action, whose actions keep the order of the row. In lane F a stage's
#: state is used; in I autograd adds to gradients at once; in W a split backward adds to them later.
_LANES = {"F": "F", "B": "IW", "I": "I", "W": "W"}

_Rows = TypeVar("_Rows", bound=ScheduleRows)


def without_fusion(schedule: _Rows) -> _Rows:
    """Returns a schedule whose fused actions run one by one, each once its own inputs are there."""
    return replace(schedule, actions=tuple(tuple(flatten(row)) for row in schedule.actions))


@shows("rank", "head", "cap")
class Envelope:
    """Which entries of its row, an action or fused actions each, one rank may run next in a batch.

    Attributes:
        rank: The rank.
        head: The position in the row of the first entry that has not run; the row's length at its
            end.
        cap: Most that the rank may hold at once.
        in_flight: The activations in flight on it.
    """

    def __init__(
        self,
        schedule: ScheduleRows,
        rank: int,
        edges: Iterable[Edge] | None = None,
        memory_cap: float | None = None,
        costs: Costs | None = None,
        shared: bool = False,
    ) -> None:
        """Prepares the envelope of a rank of which no entry has run.

        Args:
            schedule: A schedule that has been verified for these edges and this cap.
            rank: The rank.
            edges: Values that pass between stages; None means the chain.
            memory_cap: The most that the rank may hold, in bytes if ``costs`` has bytes, else in
                forwards of one stage; None: the peak of the rank's own row.
            costs: The memory of the stages; times do not matter.
            shared: Whether stages of the rank share a parameter or a buffer.
        """
        in_bytes = costs is not None and costs.bytes is not None
        amounts = list(amounts_in_flight(schedule, rank, costs, in_bytes=in_bytes))
        before = [0.0, *(amount.after for amount in amounts)]
        self.rank = rank
        self.cap = max((amount.during for amount in amounts), default=0.0)
        if memory_cap is not None:
            self.cap = max(self.cap, memory_cap * (1 if in_bytes else schedule.slices))
        # By position of an entry: the activations that it adds while it runs, those that it adds
        # or, below 0, releases in all, and those in flight while it runs in the order of the row.
        self._added_during = [one.during - earlier for one, earlier in zip(amounts, before)]
        self._added_after = [one.after - earlier for one, earlier in zip(amounts, before)]
        self._during = [amount.during for amount in amounts]
        # By position: how many entries must run before, and the entries that wait for this one.
        self._needed_counts = [0 for _ in amounts]
        self._needed_by: list[list[int]] = [[] for _ in amounts]
        for position, needed in enumerate(_needed_positions(schedule, rank, edges, shared)):
            self._needed_counts[position] = len(needed)
            for earlier_position in needed:
                self._needed_by[earlier_position].append(position)
        self.restart()

    def restart(self) -> None:
        """Goes back to the first entry of the rank's row, for the next batch."""
        self.head, self.in_flight = 0, 0.0
        # By position: how many of the entries that must run before have not run.
        self._missing_counts = [*self._needed_counts]
        self._done = [False for _ in self._needed_counts]
        # By position: the activations in flight if the rank runs the rest of its row in order.
        self._during_rest = [*self._during]
        # The positions of entries that have not run, and for which nothing is missing, ascending.
        self._startable = [n for n, count in enumerate(self._missing_counts) if not count]

    @property
    def finished(self) -> bool:
        """Whether all entries of the rank's row have run."""
        return self.head == len(self._done)

    def candidates(self) -> Iterator[int]:
        """Yields the positions of entries that may run as soon as messages are there, in order.

        The first one is the head.
        """
        return (
            position
            for position in self._startable
            if position == self.head or self._fits(position)
        )

    def take(self, position: int) -> None:
        """Records that the entry at a position runs now.

        Args:
            position: One of :meth:`candidates`.
        """
        added = self._added_after[position]
        if added:
            for skipped in range(self.head, position):
                self._during_rest[skipped] += added
        self.in_flight += added
        self._done[position] = True
        while self.head < len(self._done) and self._done[self.head]:
            self.head += 1
        self._startable.remove(position)
        for later in self._needed_by[position]:
            self._missing_counts[later] -= 1
            if not self._missing_counts[later]:
                insort(self._startable, later)

    def _fits(self, position: int) -> bool:
        """Returns whether the memory cap holds if an entry runs now, and the others in order."""
        added, cap = self._added_after[position], self.cap
        if added <= 0:
            return True
        if self.in_flight + self._added_during[position] > cap:
            return False
        skipped = islice(zip(self._done, self._during_rest), self.head, position)
        return all(done or during + added <= cap for done, during in skipped)


def _needed_positions(
    schedule: ScheduleRows, rank: int, edges: Iterable[Edge] | None, shared: bool
) -> Iterator[set[int]]:
    """Yields, for each entry of a rank's row, the positions of those that must run before it.

    ``edges`` of None stands for a chain of stages; ``shared`` says whether stages of the rank share
    a parameter or a buffer.
    """
    placement, slices = schedule.placement, schedule.slices
    dependencies = Dependencies(checked_edges(edges, placement), placement.stages)
    positions: dict[tuple[str, int, int], int] = {}
    # By lane the position of its last entry so far.
    lanes: dict[tuple[str, int], int] = {}

    def lanes_of(action: Action) -> list[tuple[str, int]]:
        return [(lane, -1 if shared else action.stage) for lane in _LANES[action.kind]]

    for position, item in enumerate(schedule.actions[rank]):
        needed: set[int | None] = set()
        for action in parts(item):
            kind, stage, number = action
            needed.update(lanes.get(lane) for lane in lanes_of(action))
            needed.update(
                positions.get((other, at, number)) for other, at in dependencies.of(kind, stage)
            )
            away = distance_to_slice_before(kind, number % slices, slices)
            if away:
                needed.add(positions.get(("B" if kind == "I" else kind, stage, number + away)))
        yield {earlier for earlier in needed if earlier is not None}
        for action in parts(item):
            positions["B" if action.kind == "I" else action.kind, action.stage, int(action[2])] = (
                position
            )
            lanes.update(dict.fromkeys(lanes_of(action), position))
