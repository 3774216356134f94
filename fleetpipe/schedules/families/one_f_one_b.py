"""1F1B and Eager1F1B: some forwards to warm up, then one forward and one backward in turn.

Four ranks, six micro-batches, B twice as long as F; a row is a rank, time runs to the right::

    1F1B
    rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0--- F4 B1--- F5 B2--- .  B3--- .  B4--- .  B5---
    rank 1  .  F0 F1 F2 .  .  .  .  B0--- F3 B1--- F4 B2--- F5 B3--- .  B4--- .  B5--- .  .
    rank 2  .  .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- F4 B3--- F5 B4--- .  B5--- .  .  .  .
    rank 3  .  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5--- .  .  .  .  .  .

    Eager1F1B
    rank 0  F0 F1 F2 F3 F4 F5 .  .  .  .  B0--- .  B1--- .  B2--- .  B3--- .  B4--- .  B5---
    rank 1  .  F0 F1 F2 F3 F4 .  .  B0--- F5 B1--- .  B2--- .  B3--- .  B4--- .  B5--- .  .
    rank 2  .  .  F0 F1 F2 .  B0--- F3 B1--- F4 B2--- F5 B3--- .  B4--- .  B5--- .  .  .  .
    rank 3  .  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5--- .  .  .  .  .  .
"""

from __future__ import annotations

from fleetpipe.schedules.action import Action
from fleetpipe.schedules.placement import Placement


def one_f_one_b(placement: Placement, micro_batches: int) -> list[list[Action]]:
    """Returns the rows of 1F1B (PipeDream-flush, arXiv:2006.09503), one stage on each rank.

    Bubble (p-1)(F+B); rank r holds the activations of min(m, p-r) micro-batches.
    """
    return [
        _row(stage, placement.ranks - 1 - stage, micro_batches) for stage in range(placement.ranks)
    ]


def eager_one_f_one_b(placement: Placement, micro_batches: int) -> list[list[Action]]:
    """Returns the rows of Eager1F1B (arXiv:2211.05322): twice the warm-up of 1F1B.

    The bubble is the same without latency; with latency, the additional forwards hide it. Rank r
    holds the activations of min(m, 2(p-r)-1) micro-batches.
    """
    return [
        _row(stage, 2 * (placement.ranks - 1 - stage), micro_batches)
        for stage in range(placement.ranks)
    ]


def _row(stage: int, warm_up: int, micro_batches: int) -> list[Action]:
    forwards = [Action("F", stage, k) for k in range(micro_batches)]
    backwards = [Action("B", stage, k) for k in range(micro_batches)]
    warm_up = min(warm_up, micro_batches)

    row = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards):
        row += (forward, backward)
    return row + backwards[micro_batches - warm_up :]
