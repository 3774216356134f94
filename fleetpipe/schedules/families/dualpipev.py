"""DualPipeV: a forward and a backward run as one fused pair, so that they may hide each other.

Three ranks, six micro-batches, F, I and W equally long and B = I + W; small letters are the second
chunk, and ``F4|b1`` is a fused pair::

    rank 0  F0 F1 F2 F3 F4 f0 i0 w0 f1 i1 w1 f2 F5|b2--- .  .  f3|B0--- b3--- .  f4|B1--- b4--- ..
    rank 1  .  F0 F1 F2 f0 F3 f1 i0 w0 f2 F4|b1--- .  f3|B0--- F5|b2--- f4|B1--- b3--- .  f5|B2- ..
    rank 2  .  .  F0 f0 F1 f1 F2 f2 F3 b0--- f3|B0--- F4|b1--- f4|B1--- F5|b2--- f5|B2--- b3--- ..
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from fleetpipe.schedules.action import Action, Fused, Item, parts
from fleetpipe.schedules.placement import Placement


def dual_pipe_v(placement: Placement, micro_batches: int) -> list[list[Item]]:
    """Returns the rows of DualPipeV (DeepSeek; the cut-in-half form of arXiv:2412.19437).

    With FB the time of a fused pair and B that of a whole backward of one chunk, F = I and m >= 2p:
    the rank that idles most does so for (p-1)(FB + B - 3W). A rank holds at most min(2m, 2p+1)
    forwards of one chunk. The order is built for at least 2p micro-batches; if m is smaller, the
    extra ones are left out.
    """
    filled = max(micro_batches, 2 * placement.ranks)
    rows = []
    for rank in range(placement.ranks):
        writer = _Writer(placement.stages_of(rank))
        _write(writer, rank, placement.ranks, filled)
        rows.append(_trim(writer.row, micro_batches) if filled > micro_batches else writer.row)
    return rows


def _write(writer: _Writer, rank: int, ranks: int, micro_batches: int) -> None:
    """Writes the row of a rank; the eight parts are those of the published schedule."""
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


class _Writer:
    """Builds a row from tokens of a kind and a chunk, each chunk's micro-batches ascending."""

    def __init__(self, stages: Sequence[int]) -> None:
        self.row: list[Item] = []
        self.stages = stages
        self.forwards, self.backwards = [0] * len(stages), [0] * len(stages)
        self.weights: deque[Action] = deque()

    def add(self, *tokens: str) -> None:
        """Adds actions one by one."""
        self.row += map(self._action, tokens)

    def fuse(self, *tokens: str) -> None:
        """Adds actions as one unit."""
        self.row.append(Fused(tuple(map(self._action, tokens))))

    def _action(self, token: str) -> Action:
        """Returns the next action of ``F0``, ``B1`` or ``I1``; ``W`` is the oldest pending one."""
        if token == "W":
            return self.weights.popleft()
        kind, chunk = token[0], int(token[1])
        counts = self.forwards if kind == "F" else self.backwards
        action = Action(kind, self.stages[chunk], counts[chunk])
        counts[chunk] += 1
        if kind == "I":
            self.weights.append(action._replace(kind="W"))
        return action


def _trim(row: Sequence[Item], micro_batches: int) -> list[Item]:
    """Returns ``row`` without the micro-batches from ``micro_batches`` on."""
    kept: list[Item] = []
    for item in row:
        left = tuple(action for action in parts(item) if action.micro_batch < micro_batches)
        if left:
            kept.append(left[0] if len(left) == 1 else Fused(left))
    return kept
