"""FThenB: all forwards, then all backwards.

Four ranks, four micro-batches, B twice as long as F; a row is a rank, time runs to the right::

    rank 0  F0 F1 F2 F3 .  .  .  .  .  .  .  .  .  B0--- B1--- B2--- B3---
    rank 1  .  F0 F1 F2 F3 .  .  .  .  .  .  B0--- B1--- B2--- B3--- .  .
    rank 2  .  .  F0 F1 F2 F3 .  .  .  B0--- B1--- B2--- B3--- .  .  .  .
    rank 3  .  .  .  F0 F1 F2 F3 B0--- B1--- B2--- B3--- .  .  .  .  .  .
"""

from __future__ import annotations

from fleetpipe.schedules.action import Action
from fleetpipe.schedules.placement import Placement


def f_then_b(placement: Placement, micro_batches: int) -> list[list[Action]]:
    """Returns the rows of GPipe (arXiv:1811.06965); with several chunks, breadth-first in a loop.

    Bubble (p-1)(F+B) in costs of one chunk, with (v-1)(p-m)(F+B) more where m < p and v > 1; every
    rank holds the activations of all m micro-batches of its v chunks (arXiv:2211.05953).
    """
    rows = []
    for rank in range(placement.ranks):
        stages = placement.stages_of(rank)
        row = [Action("F", stage, k) for stage in stages for k in range(micro_batches)]
        row += [Action("B", stage, k) for stage in stages[::-1] for k in range(micro_batches)]
        rows.append(row)
    return rows
