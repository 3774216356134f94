"""Forwards alone, for evaluation and prediction.

Four ranks with one stage each, four micro-batches; a row is a rank, time runs to the right::

    rank 0  F0 F1 F2 F3 .  .  .
    rank 1  .  F0 F1 F2 F3 .  .
    rank 2  .  .  F0 F1 F2 F3 .
    rank 3  .  .  .  F0 F1 F2 F3
"""

from __future__ import annotations

from fleetpipe.schedules.action import Action
from fleetpipe.schedules.placement import Placement


def forward_rows(placement: Placement, micro_batches: int) -> list[list[Action]]:
    """Returns rows of F only, in an order that never deadlocks on any placement.

    F(s, k) runs at time s + k, the deeper stage first if two have the same time. Everything that an
    F waits for has a smaller s + k, so all rows follow one common order.
    """
    rows = []
    for rank in range(placement.ranks):
        stages = placement.stages_of(rank)
        row = [Action("F", stage, k) for stage in stages for k in range(micro_batches)]
        rows.append(sorted(row, key=lambda one: (one.stage + one.micro_batch, -one.stage)))
    return rows
