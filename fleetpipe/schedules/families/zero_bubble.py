"""Schedules that split each backward, so that weight gradients fill the bubble.

ZBH1 and ZBH2: backwards are split, and weight gradients fill the bubble.

Four ranks, F, I and W equally long; time runs to the right::

    ZBH1
    rank 0  F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
    rank 1  .  F0 F1 F2 .  .  I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
    rank 2  .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
    rank 3  .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5

    ZBH2
    rank 0  F0 F1 F2 F3 F4 F5 F6 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6 .  .  .
    rank 1  .  F0 F1 F2 F3 F4 I0 F5 I1 F6 I2 W0 I3 W1 I4 W2 I5 W3 I6 W4 W5 W6 .  .
    rank 2  .  .  F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 F6 I4 W0 I5 W1 I6 W2 W3 W4 W5 W6 .
    rank 3  .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 W0 W1 W2 W3 W4 W5 W6

ZBV: two chunks on each rank in a vee, split backwards, no bubble where F = I = W.

Three ranks, five micro-batches, F, I and W equally long; small letters are the second chunk (rank 0
has the first and the last stage), and time runs to the right::

    rank 0  F0 F1 F2 F3 F4 f0 i0 w0 f1 i1 w1 f2 i2 w2 I0 W0 f3 i3 w3 I1 W1 f4 i4 w4 I2 W2 I3 W3 ..
    rank 1  .  F0 F1 F2 f0 F3 f1 i0 w0 f2 i1 w1 F4 I0 W0 f3 i2 w2 I1 W1 f4 i3 w3 I2 i4 I3 W2 I4 ..
    rank 2  .  .  F0 f0 F1 f1 F2 f2 i0 w0 F3 I0 W0 f3 i1 w1 F4 I1 W1 f4 i2 w2 I2 i3 I3 i4 I4 W2 ..

VHalf and VMin: a vee whose building block releases activations sooner, for less memory.

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
from fleetpipe.schedules.families.one_f_one_b import balanced_groups, in_groups
from fleetpipe.schedules.placement import Placement

#: The time from the block of a micro-batch to that of the next one: F, I and W of two chunks.
_PERIOD = 6

#: The block of a rank: when, for micro-batch 0, it begins F of its first and of its second chunk,
#: I of the second and I of the first.
_Block = tuple[int, int, int, int]


def zb_h1(placement: Placement, micro_batches: int) -> list[list[Action]]:
    """Returns the rows of ZB-H1 (arXiv:2401.10241); with several chunks, of interleaved ZB-1P.

    With g0 the size of the first group (see ``interleaved``), in costs of one chunk:

    - bubble (p-1)(F+I-W) for m >= p, if W is not longer than F or I; (p-1)I if W is longer than F
      and v = 1;
    - every rank holds min(mv, (v-1)g0 + p) forwards of one chunk: for v = 1 as many as rank 0 of
      1F1B.

    Args:
        placement: A loop of p ranks with v chunks each.
        micro_batches: Micro-batches of a batch, m.
    """
    return _zb_rows(placement, micro_batches, 1)


def zb_h2(placement: Placement, micro_batches: int) -> list[list[Action]]:
    """Returns the rows of ZB-H2 (arXiv:2401.10241), one stage on each rank.

    Bubble (p-1)(F+I-2W) for m >= 2p-1, if W is not longer than F or I; so none if all are equal.
    With fewer micro-batches ZBH1 ends as soon or sooner. Every rank holds the activations of min(m,
    2p-1) micro-batches.

    Args:
        placement: A loop of p ranks with one chunk each.
        micro_batches: Micro-batches of a batch, m.
    """
    return _zb_rows(placement, micro_batches, 2)


def _zb_rows(placement: Placement, micro_batches: int, slack_per_rank: int) -> list[list[Action]]:
    """Returns the rows of ZB-H1 (a slack of 1) or ZB-H2 (a slack of 2).

    Args:
        placement: A loop.
        micro_batches: Micro-batches of a batch, m.
        slack_per_rank: Forwards of a rank's warm-up for each rank after it, and input gradients by
            which its W are late for each rank before it.
    """
    groups = balanced_groups(placement.ranks, micro_batches)
    rows = []
    for rank in range(placement.ranks):
        slack = slack_per_rank * (placement.ranks - 1 - rank)
        rows.append(_zb_row(placement.stages_of(rank), groups, slack, lag=slack_per_rank * rank))
    return rows


def _zb_row(stages: Sequence[int], groups: Sequence[int], slack: int, lag: int) -> list[Action]:
    """Returns the row of one rank of ZB-H1 or ZB-H2.

    ``groups`` are the sizes of the groups in which micro-batches pass the rank's stages. ``slack``
    is the number of forwards of the warm-up, beside those that lead the first group to the last
    stage; ``lag`` the number of I that run between an I and its W.
    """
    forwards = in_groups("F", stages, groups)
    gradients = in_groups("I", stages[::-1], groups)
    weights = in_groups("W", stages[::-1], groups)
    warm_up = min(slack + (len(stages) - 1) * groups[0], len(forwards))

    row = forwards[:warm_up]
    for step, gradient in enumerate(gradients):
        row += forwards[warm_up + step : warm_up + step + 1]
        row.append(gradient)
        if step >= lag:
            row.append(weights[step - lag])
    return row + weights[max(0, len(weights) - lag) :]


def zb_v(placement: Placement, micro_batches: int) -> list[list[Action]]:
    """Returns the rows of ZB-V (arXiv:2401.10241) in its fixed pattern, which needs no costs.

    If F = I = W on each chunk, there is no bubble for m >= 2p-1. The pattern is built for that many
    micro-batches; if m is smaller, the extra ones are left out: bubble 2(2p-1-m). A rank holds at
    most min(2m, 2p) forwards of one chunk, as much as rank 0 of 1F1B.
    """
    ranks = placement.ranks
    filled = max(micro_batches, 2 * ranks - 1)
    rows = []
    for rank in range(ranks):
        streams = {
            f"{kind}{chunk}": iter([Action(kind, stage, k) for k in range(filled)])
            for kind in "FIW"
            for chunk, stage in enumerate(placement.stages_of(rank))
        }
        row = [next(streams[token]) for token in _zb_v_pattern(rank, ranks, filled)]
        rows.append([action for action in row if action[2] < micro_batches])
    return rows


def _zb_v_pattern(rank: int, ranks: int, micro_batches: int) -> list[str]:
    """Returns a rank's row as tokens such as ``F0``: a kind and a chunk.

    Each token stands for the next micro-batch of its kind and chunk; there are 2p-1 or more.
    """
    after = ranks - rank
    pattern = ["F0"] * (2 * after - 1)
    pattern += ["F1", "F0"] * rank
    pattern += ["F1", "I1", "W1"] * after
    # Here 2p-1-r forwards of chunk 0 are done, and p of chunk 1.
    pattern += ["F0", "I0", "W0", "F1", "I1", "W1"] * (micro_batches - ranks - after + 1)
    pattern += ["I0", "W0", "F1", "I1", "W1"] * (after - 1)
    pattern += ["I0", "I1"] * rank
    pattern += ["I0", "W0"] * after
    return pattern + ["W1"] * rank + ["W0"] * rank


def v_half(placement: Placement, micro_batches: int) -> list[list[Action]]:
    """Returns the rows of V-Half (arXiv:2405.15362): about half the activations of 1F1B.

    If F = I = W = 1 on each chunk:

    - bubble 3p-7 for even p (1 for p = 2) and 3p-4 for odd p; for small m at most the larger of
      this and 4p-3-2m;
    - a rank holds at most min(2m, 2 * floor((p+2)/2)) forwards of one chunk.

    If F, I and W differ, the bubble can grow with m.
    """
    ranks = placement.ranks
    # A block is the start times of F on both chunks and of B on both. With the shift, blocks
    # of consecutive micro-batches never use the same time.
    shift = 3 if ranks % 2 == 0 else 0
    back = 3 * ranks - 1 + shift
    blocks = [
        (2 * rank, 3 * ranks - 2 - rank, back + 2 * rank, back + 3 * ranks - 1 - rank)
        for rank in range(ranks)
    ]
    return _rows_of_blocks(
        placement, micro_batches, blocks, 2 * ((ranks + 2) // 2), swaps=shift > 0
    )


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
    return _rows_of_blocks(
        placement, micro_batches, blocks, 2 * ((ranks + 4) // 3), swaps=shift > 0
    )


def _rows_of_blocks(
    placement: Placement, micro_batches: int, blocks: Sequence[_Block], cap: int, swaps: bool
) -> list[list[Action]]:
    """Returns the rows of blocks that are repeated for each micro-batch, without their gaps.

    Time runs in slots of one action. In each slot a rank runs the next action of its repeated
    block. If that has to wait, it runs the one after it, if ``swaps`` allows that, or its oldest W.

    This never deadlocks. Of all actions left, the one that comes first in the repeated blocks is
    first on its rank and has its inputs. If it is an F, there is room in memory as soon as all
    pending W are done: the block holds at most ``cap`` with any W later than its I, and a swap,
    which happens within ``cap``, does not change what is in flight at a later F.

    Args:
        placement: A vee.
        micro_batches: Micro-batches of a batch, m.
        blocks: The block of each rank.
        cap: Most forwards of one chunk that a rank may hold.
        swaps: Whether a rank may run the action after one that has to wait.
    """
    ranks = [
        _RankInSlots(placement.stages_of(rank), block, micro_batches, cap, swaps)
        for rank, block in enumerate(blocks)
    ]
    # By kind and stage, how many micro-batches are done. The item after the last stage, which is
    # index -1 too, stands for the model's inputs and its loss: all of these are there.
    done = {kind: [0] * placement.stages + [micro_batches] for kind in "FI"}
    unfinished = list(ranks)
    while unfinished:
        # All choose before any is recorded: other ranks see an action in the next slot.
        chosen = [(rank, rank.choose(done)) for rank in unfinished]
        for rank, action in chosen:
            if action is not None:
                rank.record(action)
                if action[0] != "W":
                    done[action[0]][action[1]] += 1
        unfinished = [rank for rank in unfinished if rank.ahead or rank.weights]
    return [rank.row for rank in ranks]


class _RankInSlots:
    """One rank that runs its repeated block in slots of time.

    Attributes:
        ahead: The F and I of the repeated block that have not run, the next one last.
        row: The actions that have run.
        weights: The W whose I has run, the oldest first.
        free: Forwards of one chunk that the rank may hold in addition.
        indices: The indices in ``ahead`` of the actions that may run next.
    """

    def __init__(
        self, stages: Sequence[int], block: _Block, micro_batches: int, cap: int, swaps: bool
    ) -> None:
        first, second = stages
        timed = [
            (start + _PERIOD * k, Action(kind, stage, k))
            for start, kind, stage in zip(block, "FFII", (first, second, second, first))
            for k in range(micro_batches)
        ]
        self.ahead = [action for _, action in sorted(timed, reverse=True)]
        self.row: list[Action] = []
        self.weights: deque[Action] = deque()
        self.free = cap
        self.indices = (-1, -2) if swaps else (-1,)

    def choose(self, done: dict[str, list[int]]) -> Action | None:
        """Removes and returns the action that the rank runs in this slot; None if it waits.

        Args:
            done: By kind and stage, the number of micro-batches that are done.
        """
        for index in self.indices[: len(self.ahead)]:
            kind, stage, micro_batch = self.ahead[index]
            if kind == "F":
                ready = self.free > 0 and done["F"][stage - 1] > micro_batch
            else:
                ready = done["F"][stage] > micro_batch and done["I"][stage + 1] > micro_batch
            if ready:
                return self.ahead.pop(index)
        return self.weights.popleft() if self.weights else None

    def record(self, action: Action) -> None:
        """Adds an action to the rank's row; updates the forwards that the rank may still hold."""
        self.row.append(action)
        if action[0] == "F":
            self.free -= 1
        elif action[0] == "I":
            self.weights.append(Action("W", *action[1:]))
        else:
            self.free += 1
