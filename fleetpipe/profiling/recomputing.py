"""Chooses the layers to recompute so that a rank fits into memory: the cheapest bytes first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from fleetpipe.profiling.cost_model import LayerCost, Stages
from fleetpipe.profiling.memory import Peak, activation_peak, static_bytes
from fleetpipe.schedules import Schedule

#: For each stage the layers that are recomputed.
Recompute = tuple[tuple[int, ...], ...]


def choose(
    schedule: Schedule,
    layers: Sequence[LayerCost],
    stages: Stages,
    boundaries: Sequence[int],
    free: float,
    optimizer_copies: float,
) -> Recompute:
    """Returns for each stage the layers to recompute; all of a rank that does not fit even so.

    Args:
        schedule: The schedule that runs.
        layers: The layers of the model.
        stages: The costs of stages of these layers.
        boundaries: The cut.
        free: Bytes that a rank may use.
        optimizer_copies: Tensors of the size of a gradient in the optimizer's state.
    """
    plain, ranges = stages.cut(boundaries), list(itertools.pairwise(boundaries))
    chosen: list[tuple[int, ...]] = [()] * len(plain)
    for rank in range(schedule.placement.ranks):
        costs = {stage: plain[stage] for stage in schedule.placement.stages_of(rank)}
        left = free - static_bytes([*costs.values()], optimizer_copies)
        peak = activation_peak(schedule, rank, costs)
        numbered = [(s, n) for s in costs for n in range(*ranges[s]) if layers[n].saved]
        prices = {(s, n): _price(layers[n], s, peak) for s, n in numbered}
        for stage, number in sorted(prices, key=prices.__getitem__):
            if peak.bytes <= left:
                break
            chosen[stage] = tuple(sorted((*chosen[stage], number)))
            costs[stage] = stages.stage(*ranges[stage], chosen[stage])
            peak = activation_peak(schedule, rank, costs)
    return tuple(chosen)


def _price(layer: LayerCost, stage: int, peak: Peak) -> float:
    """Returns the seconds that recompute of a layer takes for each byte it saves at the peak."""
    gain = (
        peak.whole[stage] * layer.saved
        + peak.split[stage] * layer.saved_split
        + peak.waiting[stage] * layer.waiting
    )
    return layer.forward / gain if gain > 0 else math.inf
