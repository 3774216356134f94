"""Hanayo: an even number of chunks in waves, each rank running the oldest backward that is ready.

Two ranks, three micro-batches, B twice as long as F, one wave of two chunks; small letters are the
second chunk, and time runs to the right::

    rank 0  F0 F1 F2 f0 b0--- f1 b1--- .  B0--- .  .  B1--- f2 b2--- .  .  .  .  B2---
    rank 1  .  F0 f0 F1 f1 F2 b0--- B0--- b1--- B1--- f2 .  .  .  .  b2--- B2--- .  .
"""

from __future__ import annotations

from heapq import heappop, heappush

from fleetpipe.schedules.action import Action
from fleetpipe.schedules.placement import Placement

#: The times of an action, by which the ranks are run against each other.
_FORWARD, _BACKWARD = 1, 2


def hanayo(placement: Placement, micro_batches: int) -> list[list[Action]]:
    """Returns the rows of Hanayo (arXiv:2308.15762): w waves of two chunks each.

    At the first and the last rank a value goes on to the next chunk without a transfer. With w
    waves a chunk, and so the warm-up, is w times as short. For m = p and B = 2F the bubble rate is
    about (2p-2)/(3wp+p-1) for two waves or more, and less for one. A rank holds up to 2wm forwards
    of one chunk for m <= p, and fewer than that for more, since backwards come first.

    Args:
        placement: A wave of p ranks with 2w chunks each.
        micro_batches: Micro-batches of a batch, m.
    """
    waves = _Waves(placement, micro_batches)
    waves.run()
    return waves.rows


class _Waves:
    """The state of all ranks at one time: the actions that each could run, and the running ones.

    An action is a number; a rank runs the smallest first: backwards come first, then the oldest
    micro-batch, and within it the deepest stage.
    """

    def __init__(self, placement: Placement, micro_batches: int) -> None:
        self.stages = placement.stages
        #: The number of the first forward.
        self.forwards = self.stages * micro_batches
        self.owners = [placement.rank_of(stage) for stage in reversed(range(self.stages))]
        self.order: list[list[int]] = [[] for _ in range(placement.ranks)]
        self.ready: list[list[int]] = [[] for _ in self.order]
        #: End, rank and action.
        self.running: list[tuple[int, int, int]] = []
        self.free = [True] * placement.ranks
        #: Ranks that may have something to begin, since they became free or were given work.
        self.woken: set[int] = set()
        for micro_batch in range(micro_batches):
            self._add(self.forwards + micro_batch * self.stages + self.stages - 1)

    @property
    def rows(self) -> list[list[Action]]:
        """The actions that each rank has run."""
        return [list(map(self._action, row)) for row in self.order]

    def run(self) -> None:
        """Lets each free rank run its first possible action, until nothing is left."""
        now = 0
        while self.woken:
            for rank in self.woken:
                if self.free[rank] and self.ready[rank]:
                    self._begin(rank, heappop(self.ready[rank]), now)
            self.woken = set()
            now = self.running[0][0] if self.running else now
            while self.running and self.running[0][0] == now:
                _, rank, number = heappop(self.running)
                self.free[rank] = True
                self.woken.add(rank)
                self._follow(number)

    def _begin(self, rank: int, number: int, now: int) -> None:
        """Records that a rank runs an action from now on."""
        self.order[rank].append(number)
        self.free[rank] = False
        time = _FORWARD if number >= self.forwards else _BACKWARD
        heappush(self.running, (now + time, rank, number))

    def _follow(self, number: int) -> None:
        """Makes the actions that waited for an action ready to run."""
        above = number % self.stages
        if number < self.forwards:
            if above < self.stages - 1:
                self._add(number + 1)
        else:
            self._add(number - 1 if above > 0 else number - self.forwards)

    def _add(self, number: int) -> None:
        rank = self.owners[number % self.stages]
        heappush(self.ready[rank], number)
        self.woken.add(rank)

    def _action(self, number: int) -> Action:
        kind, rest = divmod(number, self.forwards)
        micro_batch, above = divmod(rest, self.stages)
        return Action("BF"[kind], self.stages - 1 - above, micro_batch)
