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
from fleetpipe.schedules.schedule import Schedule


def forward_only(placement: Placement, micro_batches: int) -> Schedule:
    """Returns a schedule of F only, in an order that never deadlocks on any placement.

    F(s, k) comes at time s + k, the deeper stage first where two fall together. Whatever
    an F waits for has a smaller s + k, so every rank's row follows one order of the whole.

    Args:
        placement: Which rank owns which stage.
        micro_batches: Micro-batches of a batch, m.

    Raises:
        ConfigError: Fewer than one micro-batch.
    """
    rows = []
    for rank in range(placement.ranks):
        stages = placement.stages_of(rank)
        row = [Action("F", stage, k) for stage in stages for k in range(micro_batches)]
        rows.append(tuple(sorted(row, key=_time)))
    return Schedule("ForwardOnly", placement, micro_batches, tuple(rows), forward_only=True)


def _time(action: Action) -> tuple[int, int]:
    return action.stage + action.micro_batch, -action.stage
