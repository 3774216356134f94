"""VHalf and VMin: a vee whose building block releases activations sooner, for less memory.

Four ranks, four micro-batches, F, I and W equally long; small letters are the second chunk. Rank 0
holds at most 6 forwards under VHalf and 4 under VMin, where ZBV holds 8::

    VHalf
    rank 0  F0 F1 F2 .  .  .  .  f0 i0 f1 F3 i1 w0 f2 i2 w1 I0 w2 W0 f3 i3 I1 w3 I2 W1 W2 .  I3 ..
    rank 1  .  F0 F1 F2 .  .  f0 .  f1 i0 f2 w0 F3 i1 w1 I0 i2 W0 f3 w2 I1 i3 I2 W1 w3 W2 I3 W3 ..
    rank 2  .  .  F0 F1 .  f0 F2 f1 .  f2 i0 w0 .  F3 I0 i1 W0 f3 i2 I1 w1 I2 i3 w2 W1 I3 W2 w3 ..
    rank 3  .  .  .  F0 f0 F1 f1 F2 f2 .  .  i0 I0 w0 F3 W0 f3 i1 I1 i2 I2 w1 W1 i3 I3 w2 W2 w3 ..

    VMin
    rank 0  F0 F1 .  .  .  .  .  f0 i0 F2 w0 .  .  f1 i1 I0 w1 F3 W0 f2 i2 I1 w2 W1 .  f3 i3 I2 ..
    rank 1  .  F0 .  .  .  .  f0 F1 .  i0 w0 .  f1 F2 I0 i1 W0 w1 f2 F3 I1 i2 W1 w2 f3 .  I2 i3 ..
    rank 2  .  .  F0 .  .  f0 .  .  F1 .  i0 f1 w0 I0 F2 W0 i1 f2 w1 I1 F3 W1 i2 f3 w2 I2 W2 . ..
    rank 3  .  .  .  F0 f0 .  .  .  .  F1 f1 i0 I0 w0 W0 F2 f2 i1 I1 w1 W1 F3 f3 i2 I2 w2 W2 . ..
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from fleetpipe.schedules.action import Action
from fleetpipe.schedules.placement import Placement

#: Time from a micro-batch to the next in the repeated block: F, I and W of two chunks.
_PERIOD = 6

#: When the block has a rank's F of the first and second chunk, and I of the second and first.
_Block = tuple[int, int, int, int]


def v_half(placement: Placement, micro_batches: int) -> list[list[Action]]:
    """Returns the rows of V-Half (arXiv:2405.15362): about half the activations of 1F1B.

    If F = I = W = 1 on each chunk:

    - bubble 3p-7 for even p (1 for p = 2) and 3p-4 for odd p; for small m at most the larger of
      this and 4p-3-2m;
    - a rank holds at most min(2m, 2 * floor((p+2)/2)) forwards of one chunk.

    If F, I and W differ, the bubble can grow with m.
    """
    ranks = placement.ranks
    # A later backward keeps the blocks of consecutive micro-batches from falling together.
    shift = 3 if ranks % 2 == 0 else 0
    back = 3 * ranks - 1 + shift
    blocks = [
        (2 * rank, 3 * ranks - 2 - rank, back + 2 * rank, back + 3 * ranks - 1 - rank)
        for rank in range(ranks)
    ]
    return _rows(placement, micro_batches, blocks, 2 * ((ranks + 2) // 2), swaps=shift > 0)


def v_min(placement: Placement, micro_batches: int) -> list[list[Action]]:
    """Returns the rows of V-Min (arXiv:2405.15362): about a third of the activations of 1F1B.

    If F = I = W = 1 on each chunk:

    - bubble 4p-7 if 3 divides p (2 more for m = 1), else 4p-5;
    - a rank holds at most min(2m, 2 * floor((p+4)/3)) forwards of one chunk.

    If F, I and W differ, the bubble grows with m.
    """
    ranks = placement.ranks
    shift = 2 if ranks % 3 == 0 else 0
    blocks = [
        (rank, 2 * ranks - 1 - rank, 2 * ranks + shift + rank, 4 * ranks - 1 + shift - rank)
        for rank in range(ranks)
    ]
    return _rows(placement, micro_batches, blocks, 2 * ((ranks + 4) // 3), swaps=shift > 0)


def _rows(
    placement: Placement, micro_batches: int, blocks: Sequence[_Block], cap: int, swaps: bool
) -> list[list[Action]]:
    """Returns the rows of a block that is repeated for each micro-batch and then pulled together.

    In time slots of one action each rank runs the next of its repeated block. If that has to wait,
    it runs the one after it, if ``swaps`` allows that, or else its oldest W.

    This cannot get stuck. Of all actions left, the one that comes first in the repeated blocks is
    first on its rank and has its inputs. If it is an F, memory has room as soon as all pending W
    are done: the block holds at most ``cap`` with any W later than its I, and a swap, which happens
    within ``cap``, leaves every later F with what was in flight before it.
    """
    ranks = [
        _Rank(placement.stages_of(rank), block, micro_batches, cap, swaps)
        for rank, block in enumerate(blocks)
    ]
    # How many forwards and input gradients of each stage are done; where no stage is, all are.
    done = {kind: [0] * placement.stages + [micro_batches] for kind in "FI"}
    left = list(ranks)
    while left:
        # All choose before any is noted: what one does in a slot the others see in the next.
        chosen = [(rank, rank.choose(done)) for rank in left]
        for rank, action in chosen:
            if action is not None:
                rank.note(action)
                if action[0] != "W":
                    done[action[0]][action[1]] += 1
        left = [rank for rank in left if rank.ahead or rank.weights]
    return [rank.row for rank in ranks]


class _Rank:
    """One rank on its way through the repeated block."""

    def __init__(
        self, stages: Sequence[int], block: _Block, micro_batches: int, cap: int, swaps: bool
    ) -> None:
        first, second = stages
        timed = [
            (offset + _PERIOD * k, Action(kind, stage, k))
            for offset, kind, stage in zip(block, "FFII", (first, second, second, first))
            for k in range(micro_batches)
        ]
        # Backwards, so that the next action is the last.
        self.ahead = [action for _, action in sorted(timed, reverse=True)]
        self.row: list[Action] = []
        self.weights: deque[Action] = deque()
        self.free = cap
        self.looks = (-1, -2) if swaps else (-1,)

    def choose(self, done: dict[str, list[int]]) -> Action | None:
        """Removes and returns the action that the rank runs in this slot; None if it waits."""
        for look in self.looks[: len(self.ahead)]:
            kind, stage, micro_batch = self.ahead[look]
            if kind == "F":
                ready = self.free > 0 and done["F"][stage - 1] > micro_batch
            else:
                ready = done["F"][stage] > micro_batch and done["I"][stage + 1] > micro_batch
            if ready:
                return self.ahead.pop(look)
        return self.weights.popleft() if self.weights else None

    def note(self, action: Action) -> None:
        """Records that the rank ran ``action``."""
        self.row.append(action)
        if action[0] == "F":
            self.free -= 1
        elif action[0] == "I":
            self.weights.append(Action("W", *action[1:]))
        else:
            self.free += 1
