"""ZBV: two chunks on each rank in a vee, split backwards, no bubble where F = I = W.

Three ranks, five micro-batches, F, I and W equally long; small letters are the second chunk (rank 0
has the first and the last stage), and time runs to the right::

    rank 0  F0 F1 F2 F3 F4 f0 i0 w0 f1 i1 w1 f2 i2 w2 I0 W0 f3 i3 w3 I1 W1 f4 i4 w4 I2 W2 I3 W3 ..
    rank 1  .  F0 F1 F2 f0 F3 f1 i0 w0 f2 i1 w1 F4 I0 W0 f3 i2 w2 I1 W1 f4 i3 w3 I2 i4 I3 W2 I4 ..
    rank 2  .  .  F0 f0 F1 f1 F2 f2 i0 w0 F3 I0 W0 f3 i1 w1 F4 I1 W1 f4 i2 w2 I2 i3 I3 i4 I4 W2 ..
"""

from __future__ import annotations

from fleetpipe.schedules.action import Action
from fleetpipe.schedules.placement import Placement


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
        row = [next(streams[token]) for token in _pattern(rank, ranks, filled)]
        rows.append([action for action in row if action[2] < micro_batches])
    return rows


def _pattern(rank: int, ranks: int, micro_batches: int) -> list[str]:
    """Returns a rank's order as kinds and chunks, each chunk's micro-batches ascending."""
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
