"""Chooses the layers to recompute so that a rank fits into memory and loses the least time.

A knapsack for each rank, as in AdaPipe (ASPLOS 2024): the price is a layer's forward, the gain the
memory that it no longer holds, for all micro-batches in flight when the rank holds most.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from fleetpipe.profiling.cost_model import LayerCost, Stages
from fleetpipe.profiling.memory import Peak, activation_peak, static_bytes
from fleetpipe.schedules import Schedule

#: Parts into which the bytes that are missing are divided: gains are rounded down to them.
_PARTS = 256

#: The moment of the peak moves as layers are chosen, so the choice is made anew.
_ROUNDS = 4

#: For each stage the layers that are recomputed.
Recompute = tuple[tuple[int, ...], ...]


def choose(
    schedule: Schedule,
    layers: Sequence[LayerCost],
    stages: Stages,
    boundaries: Sequence[int],
    free: float,
    optimizer_copies: float,
) -> Recompute | None:
    """Returns for each stage the layers to recompute; None if even all would not be enough.

    Args:
        schedule: The schedule that runs.
        layers: The layers of the model.
        stages: The costs of stages of these layers.
        boundaries: The cut.
        free: Bytes that a rank may use.
        optimizer_copies: Tensors of the size of a gradient in the optimizer's state.
    """
    chosen: list[tuple[int, ...]] = [()] * (len(boundaries) - 1)
    ranges = list(itertools.pairwise(boundaries))
    plain = stages.cut(boundaries)
    for rank in range(schedule.placement.ranks):
        owned = schedule.placement.stages_of(rank)
        left = free - static_bytes([plain[stage] for stage in owned], optimizer_copies)
        ranges_of_rank = _of_rank(schedule, rank, layers, stages, ranges, left)
        if ranges_of_rank is None:
            return None
        for stage, numbers in ranges_of_rank.items():
            chosen[stage] = numbers
    return tuple(chosen)


def everything(layers: Sequence[LayerCost], boundaries: Sequence[int]) -> Recompute:
    """Returns for each stage all layers whose recompute saves memory."""
    return tuple(
        tuple(number for number in range(start, end) if layers[number].saved)
        for start, end in itertools.pairwise(boundaries)
    )


def _of_rank(
    schedule: Schedule,
    rank: int,
    layers: Sequence[LayerCost],
    stages: Stages,
    ranges: Sequence[tuple[int, int]],
    free: float,
) -> dict[int, tuple[int, ...]] | None:
    """Returns the layers to recompute in each stage of a rank, to hold ``free`` bytes at most."""
    owned = schedule.placement.stages_of(rank)

    def peak(chosen: dict[int, tuple[int, ...]]) -> Peak:
        costs = {stage: stages.stage(*ranges[stage], chosen[stage]) for stage in owned}
        return activation_peak(schedule, rank, costs)

    chosen: dict[int, tuple[int, ...]] = dict.fromkeys(owned, ())
    before = now = peak(chosen)
    missing: float = 0
    for _ in range(_ROUNDS):
        if now.bytes <= free:
            return chosen
        missing += now.bytes - free
        items = [
            (stage, number, gain)
            for stage in owned
            for number in range(*ranges[stage])
            if (gain := _gain(layers[number], stage, before)) > 0
        ]
        picked = cheapest(
            [layers[number].forward for _, number, _ in items],
            [gain for _, _, gain in items],
            missing,
        )
        if picked is None:
            break
        chosen = {
            stage: tuple(items[index][1] for index in picked if items[index][0] == stage)
            for stage in owned
        }
        now = peak(chosen)
    chosen = {stage: tuple(n for n in range(*ranges[stage]) if layers[n].saved) for stage in owned}
    return chosen if peak(chosen).bytes <= free else None


def _gain(layer: LayerCost, stage: int, peak: Peak) -> int:
    """Returns the bytes that recompute of a layer saves at a rank's peak."""
    if not layer.saved:
        return 0
    return (
        peak.whole[stage] * layer.saved
        + peak.split[stage] * layer.saved_split
        + peak.waiting[stage] * layer.waiting
    )


def cheapest(
    prices: Sequence[float], gains: Sequence[float], needed: float
) -> tuple[int, ...] | None:
    """Returns the cheapest items whose gains reach ``needed`` together.

    Exact, except that gains are rounded down to a 256th of ``needed``.

    Returns:
        The numbers of the items, ascending; None if all of them gain less.
    """
    unit = needed / _PARTS
    sizes = [min(int(gain / unit), _PARTS) for gain in gains]
    # best[g]: the lowest price of items that gain g parts or more.
    best = np.full(_PARTS + 1, math.inf)
    best[0] = 0
    taken = np.zeros((len(prices), _PARTS + 1), bool)
    before = np.maximum(np.arange(_PARTS + 1)[None, :] - np.array(sizes, int)[:, None], 0)
    for item, price in enumerate(prices):
        if sizes[item]:
            with_it = best[before[item]] + price
            taken[item] = with_it < best
            best = np.minimum(with_it, best)
    if math.isinf(best[_PARTS]):
        return None
    picked, gain = [], _PARTS
    for item in reversed(range(len(prices))):
        if taken[item, gain]:
            picked.append(item)
            gain = int(before[item, gain])
    return tuple(reversed(picked))
