"""Schedules whose stages run through the ranks forth and back: Hanayo and DualPipeV.

Hanayo: an even number of chunks in waves, each rank running the oldest backward that is ready.

Two ranks, three micro-batches, B twice as long as F, one wave of two chunks; small letters are the
second chunk, and time runs to the right::

    rank 0  F0 F1 F2 f0 b0--- f1 b1--- .  B0--- .  .  B1--- f2 b2--- .  .  .  .  B2---
    rank 1  .  F0 f0 F1 f1 F2 b0--- B0--- b1--- B1--- f2 .  .  .  .  b2--- B2--- .  .

DualPipeV: a forward and a backward run as one fused pair, so that they may hide each other.

Three ranks, six micro-batches, F, I and W equally long and B = I + W; small letters are the second
chunk, and ``F4|b1`` is a fused pair::

    rank 0  F0 F1 F2 F3 F4 f0 i0 w0 f1 i1 w1 f2 F5|b2--- .  .  f3|B0--- b3--- .  f4|B1--- b4--- ..
    rank 1  .  F0 F1 F2 f0 F3 f1 i0 w0 f2 F4|b1--- .  f3|B0--- F5|b2--- f4|B1--- b3--- .  f5|B2- ..
    rank 2  .  .  F0 f0 F1 f1 F2 f2 F3 b0--- f3|B0--- F4|b1--- f4|B1--- F5|b2--- f5|B2--- b3--- ..
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

from fleetpipe.schedules.action import Action, Fused, Item, parts
from fleetpipe.schedules.placement import Placement

#: Nominal times of an action, for the simulation of all ranks.
_NOMINAL_TIMES = {"F": 1, "B": 2}


def hanayo(placement: Placement, micro_batches: int) -> list[list[Action]]:
    """Returns the rows of Hanayo (arXiv:2308.15762): w waves of two chunks each.

    All ranks are simulated with nominal times; each runs the best of its actions that are ready.
    At the first and the last rank a value goes on to the next chunk without a transfer. With w
    waves a chunk, and so the warm-up, is w times as short. For m = p and B = 2F the bubble rate is
    about (2p-2)/(3wp+p-1) for two waves or more, and less for one. A rank holds up to 2wm forwards
    of one chunk for m <= p, and fewer than that for more, since backwards come first.

    Args:
        placement: A wave of p ranks with 2w chunks each.
        micro_batches: Micro-batches of a batch, m.
    """
    last = placement.stages - 1
    owners = [placement.rank_of(stage) for stage in range(placement.stages)]
    rows: list[list[Action]] = [[] for _ in range(placement.ranks)]
    # For each rank the actions whose inputs are there, as a heap of (kind, micro-batch, -stage):
    # backwards come first, then the oldest micro-batch, and within it the deepest stage.
    ready: list[list[tuple[str, int, int]]] = [[] for _ in rows]
    ready[0] = [("F", k, 0) for k in range(micro_batches)]
    # The time at which each running action ends, its rank, and the action, as a heap.
    running: list[tuple[int, int, Action]] = []
    idle = set(range(placement.ranks))
    now = 0
    while True:
        for rank in [rank for rank in idle if ready[rank]]:
            kind, k, negative_stage = heappop(ready[rank])
            rows[rank].append(Action(kind, -negative_stage, k))
            heappush(running, (now + _NOMINAL_TIMES[kind], rank, rows[rank][-1]))
            idle.remove(rank)
        if not running:
            return rows
        now = running[0][0]
        while running and running[0][0] == now:
            _, rank, (kind, stage, k) = heappop(running)
            idle.add(rank)
            if kind == "F" and stage < last:
                stage += 1
            elif kind == "F":
                kind = "B"
            else:
                stage -= 1
            if stage >= 0:
                heappush(ready[owners[stage]], (kind, k, -stage))


def dual_pipe_v(placement: Placement, micro_batches: int) -> list[list[Item]]:
    """Returns the rows of DualPipeV (DeepSeek; the cut-in-half form of arXiv:2412.19437).

    With FB the time of a fused pair and B that of a whole backward of one chunk, F = I and m >= 2p:
    the rank that idles most does so for (p-1)(FB + B - 3W). A rank holds at most min(2m, 2p+1)
    forwards of one chunk. The order is built for at least 2p micro-batches; if m is smaller, the
    extra ones are left out.

    Args:
        placement: A vee of p ranks with two chunks each.
        micro_batches: Micro-batches of a batch, m.
    """
    filled = max(micro_batches, 2 * placement.ranks)
    rows = []
    for rank in range(placement.ranks):
        writer = _RowWriter(placement.stages_of(rank))
        _write_row(writer, rank, placement.ranks, filled)
        rows.append(_trim_row(writer.row, micro_batches) if filled > micro_batches else writer.row)
    return rows


def _write_row(writer: _RowWriter, rank: int, ranks: int, micro_batches: int) -> None:
    """Adds all actions of a rank's row to ``writer``, in the eight steps of the published schedule.

    There are at least twice as many micro-batches as ranks.
    """
    # The number of ranks behind this one; the counts below are those of the published schedule.
    after = ranks - 1 - rank
    for _ in range(2 * after):
        writer.add("F0")
    for _ in range(rank + 1):
        writer.add("F0", "F1")
    for _ in range(after):
        writer.add("I1", "W", "F1")
    for index in range(micro_batches - 2 * ranks + rank + 1):
        if index == 0 and after == 0:
            # The last rank's F0 can run while the gradient for its first B1 is under way.
            writer.add("F0", "B1")
        else:
            writer.fuse("F0", "B1")
        writer.fuse("F1", "B0")
    for _ in range(after):
        writer.add("B1")
        writer.fuse("F1", "B0")
    # Backwards are whole in the first half of these, split in the second.
    for index in range(2 * (rank + 1)):
        writer.add(("B" if index <= rank else "I") + "10"[index % 2])
    for _ in range(after):
        writer.add("W", "I0")
    for _ in range(rank + 1):
        writer.add("W")


class _RowWriter:
    """Writes a rank's row from tokens: a kind and a chunk such as ``F0``, or ``W`` alone.

    A token stands for an action of the next micro-batch of its kind and chunk: the first ``F0`` is
    of micro-batch 0, the second one of micro-batch 1. ``B1`` and ``I1`` count together, as a chunk
    has one backward for each micro-batch. ``W`` is the weight gradient of the oldest I without one.

    Attributes:
        row: The row as far as it is written.
        stages: The stage of each of the rank's chunks.
        forwards: For each chunk the micro-batch of its next F.
        backwards: For each chunk the micro-batch of its next B or I.
        weights: The W of each I in the row whose W is not in the row yet, the oldest first.
    """

    def __init__(self, stages: Sequence[int]) -> None:
        self.row: list[Item] = []
        self.stages = stages
        self.forwards, self.backwards = [0] * len(stages), [0] * len(stages)
        self.weights: deque[Action] = deque()

    def add(self, *tokens: str) -> None:
        """Adds the actions of tokens such as ``F0`` to the row, one after another."""
        self.row += map(self._next_action, tokens)

    def fuse(self, *tokens: str) -> None:
        """Adds the actions of tokens such as ``F0`` to the row, as one fused unit."""
        self.row.append(Fused(tuple(map(self._next_action, tokens))))

    def _next_action(self, token: str) -> Action:
        """Returns the action of a token, and counts it.

        Args:
            token: ``F0`` or ``I1``: kind and chunk of an action of the chunk's next micro-batch;
                ``W``: the oldest W that waits.
        """
        if token == "W":
            return self.weights.popleft()
        kind, chunk = token[0], int(token[1])
        counts = self.forwards if kind == "F" else self.backwards
        action = Action(kind, self.stages[chunk], counts[chunk])
        counts[chunk] += 1
        if kind == "I":
            self.weights.append(action._replace(kind="W"))
        return action


def _trim_row(row: Sequence[Item], micro_batches: int) -> list[Item]:
    """Returns a row without the actions of the micro-batches numbered ``micro_batches`` or higher.

    An action whose partner in a fused unit is dropped stands alone.
    """
    shortened: list[Item] = []
    for item in row:
        actions = tuple(action for action in parts(item) if action.micro_batch < micro_batches)
        if actions:
            shortened.append(actions[0] if len(actions) == 1 else Fused(actions))
    return shortened
