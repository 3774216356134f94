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

#: The time of an action, by which the ranks are played against each other.
_TIMES = {"F": 1, "B": 2}


def hanayo(placement: Placement, micro_batches: int) -> list[list[Action]]:
    """Returns the rows of Hanayo (arXiv:2308.15762): w waves of two chunks each.

    A value turns round at the first and the last rank without a transfer, and w waves make a
    chunk, and with it the warm-up, w times as short. For m = p and B = 2F the bubble rate is about
    (2p-2)/(3wp+p-1) for two waves or more, and less for one. A rank holds up to 2wm forwards of
    one chunk for m <= p, and fewer than that for more, since backwards come first.

    Args:
        placement: A wave of p ranks with 2w chunks each.
        micro_batches: Micro-batches of a batch, m.
    """
    player = _Player(placement, micro_batches)
    player.run()
    return player.rows


class _Player:
    """All ranks at one time: what each could run, and what runs until when."""

    def __init__(self, placement: Placement, micro_batches: int) -> None:
        self.rows: list[list[Action]] = [[] for _ in range(placement.ranks)]
        self.last = placement.stages - 1
        self.owners = [placement.rank_of(stage) for stage in range(placement.stages)]
        #: What each rank could run: backwards first, then the oldest, of these the deepest.
        self.ready: list[list[tuple[bool, int, int, Action]]] = [[] for _ in self.rows]
        self.running: list[tuple[int, int, Action]] = []
        for micro_batch in range(micro_batches):
            self._add(Action("F", 0, micro_batch))

    def run(self) -> None:
        """Lets a rank that is free run the first thing that it could, until nothing is left."""
        now, free = 0, set(range(len(self.rows)))
        while True:
            for rank in sorted(free):
                if self.ready[rank]:
                    *_, action = heappop(self.ready[rank])
                    self.rows[rank].append(action)
                    heappush(self.running, (now + _TIMES[action.kind], rank, action))
                    free.remove(rank)
            if not self.running:
                return
            now = self.running[0][0]
            while self.running and self.running[0][0] == now:
                _, rank, action = heappop(self.running)
                free.add(rank)
                self._follow(action)

    def _follow(self, action: Action) -> None:
        """Makes ready what waited for an action."""
        kind, stage, micro_batch = action
        if kind == "F":
            deeper = stage < self.last
            self._add(Action("F", stage + 1, micro_batch) if deeper else action._replace(kind="B"))
        elif stage > 0:
            self._add(Action("B", stage - 1, micro_batch))

    def _add(self, action: Action) -> None:
        kind, stage, micro_batch = action
        heappush(self.ready[self.owners[stage]], (kind == "F", micro_batch, -stage, action))
