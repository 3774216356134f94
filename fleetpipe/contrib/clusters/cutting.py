"""Cuts a model for an estimate so that its slowest stage is as fast as possible."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

from fleetpipe.partition import fastest
from fleetpipe.profiling.cost_model import LayerCost, StageCost, Stages


@lru_cache(maxsize=1024)
def stages_of(layers: tuple[LayerCost, ...], stages: int) -> tuple[StageCost, ...] | None:
    """Returns the costs of the stages of the fastest cut; None if there are too few layers."""
    blocks = layers[1:-1]
    costs = Stages(layers, None)
    if stages == 1:
        return costs.cut((0, len(layers)))
    if len(blocks) < max(stages - 2, 1):
        return None
    if all(block is blocks[0] for block in blocks):  # a transformer's: there is nothing to search
        return costs.cut(_even(layers, stages))
    totals = [0.0, *accumulate(layer.seconds for layer in layers)]

    def seconds(start: int, end: int) -> float:
        return totals[end] - totals[start]

    places, count = range(1, len(layers)), len(layers)
    cut = fastest(places, count, stages, lambda _, *part: seconds(*part), seconds)
    return costs.cut(cut.boundaries)


def _even(layers: tuple[LayerCost, ...], stages: int) -> tuple[int, ...]:
    """Returns a cut with equally many blocks in each inner stage, and the rest at both ends."""
    first, block, last = (layers[index].seconds for index in (0, 1, -1))
    blocks, inner = len(layers) - 2, stages - 2
    sizes = range(blocks // stages, blocks // stages + 3)
    ends = [blocks, blocks]
    for limit in sorted(size * block + extra for size in sizes for extra in (0.0, first, last)):
        ends = [max(0, int((limit - extra) / block + 1e-9)) for extra in (first, last)]
        if sum(ends) + inner * int(limit / block + 1e-9) >= blocks:
            break
    ends[0] = min(ends[0], -(-blocks // stages)) if inner else blocks - min(ends[1], blocks)
    ends[1] = min(ends[1], blocks - ends[0])
    while blocks - sum(ends) < inner:
        ends[ends.index(max(ends))] -= 1
    size, more = divmod(blocks - sum(ends), inner) if inner else (0, 0)
    counts = [ends[0] + 1, *(size + (index < more) for index in range(inner)), ends[1] + 1]
    return (0, *accumulate(counts))
