"""Seq1F1B: 1F1B on slices of sequences, so that bubble and activations are those of a slice.

Three ranks, three micro-batches of two slices, B twice as long as F; small letters are the second
slice, and time runs to the right::

    rank 0  F0 f0 F1 f1 .  .  .  .  b0--- F2 B0--- f2 b1--- .  B1--- .  b2--- B2---
    rank 1  .  F0 f0 F1 .  .  b0--- f1 B0--- F2 b1--- f2 B1--- .  b2--- B2--- .  .
    rank 2  .  .  F0 f0 b0--- F1 B0--- f1 b1--- F2 B1--- f2 b2--- B2--- .  .  .  .
"""

from __future__ import annotations

from fleetpipe.schedules.action import Action, numbers
from fleetpipe.schedules.placement import Placement


def seq_one_f_one_b(
    placement: Placement, micro_batches: int, slices: int = 2
) -> list[list[Action]]:
    """Returns the rows of Seq1F1B (arXiv:2406.03488), one stage on each rank.

    With k slices, in costs of one slice: bubble (p-1)(F+B) for m >= 1; rank r holds the activations
    of min(mk, p-r+k-1) slices. Forwards run in the order of the slices, since each attends to those
    before it; backwards run in the other order, so that the gradients of keys and values are
    complete when they are needed. One slice is 1F1B.

    Args:
        placement: A loop of p ranks with one chunk each.
        micro_batches: Micro-batches of a batch, m.
        slices: Slices of each micro-batch's sequence, k.
    """
    units = numbers(micro_batches, slices)
    firsts = range(0, len(units), slices)
    backwards = [unit for first in firsts for unit in units[first : first + slices][::-1]]
    rows = []
    for stage in range(placement.ranks):
        warm_up = min(placement.ranks - 2 - stage + slices, len(units))
        row = [Action("F", stage, unit) for unit in units[:warm_up]]
        for forward, backward in zip(units[warm_up:], backwards):
            row += (Action("F", stage, forward), Action("B", stage, backward))
        done = len(units) - warm_up
        rows.append(row + [Action("B", stage, unit) for unit in backwards[done:]])
    return rows
