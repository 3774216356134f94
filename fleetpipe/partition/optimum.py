"""The cut whose heaviest stage is as light as any cut can make it.

Which cut is best is decided in three steps, so that the answer is one and the same everywhere:

1. the heaviest stage is as light as possible;
2. among such cuts, the sum of the squared weights of the stages is smallest: the stages that are
   not the heaviest are even, too;
3. among those, every cut stands as late as possible, the last cut first: layers that weigh nothing
   (activations, pooling, reshaping) stay with the layer before them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

from fleetpipe.errors import PartitionError
from fleetpipe.partition.cuts import require_enough


def balanced(weights: Sequence[int], parts: int) -> list[int]:
    """Cuts so that the heaviest stage is as light as possible; ties as the module says.

    Takes about ``parts * len(weights) ** 2`` steps at worst.

    Args:
        weights: Weight of each layer, not negative; a weight of 0 is allowed. Usually numbers of
            parameters.
        parts: Number of stages: ranks times chunks.

    Returns:
        The boundaries, ``parts + 1`` layer numbers: weights ``[3, 1, 1, 2]`` in 2 stages give
        ``[0, 1, 4]``.

    Raises:
        PartitionError: There are fewer layers than stages, or a weight is negative.
    """
    require_enough(len(weights), parts, "balanced")
    for layer, weight in enumerate(weights):
        if weight < 0:
            raise PartitionError(
                "a layer cannot weigh less than nothing",
                where=f"layer {layer}",
                got=str(weight),
                fix="give weights of 0 or more",
            )
    totals = [0, *accumulate(weights)]
    lightest, _ = _best_cut(totals, parts, max, lambda weight: weight)
    return _best_cut(
        totals, parts, lambda before, stage: before + stage, lambda weight: weight**2, lightest
    )[1]


def _best_cut(
    totals: Sequence[int],
    parts: int,
    join: Callable[[float, float], float],
    cost: Callable[[int], int],
    limit: float = math.inf,
) -> tuple[float, list[int]]:
    """Finds the cheapest cut into stages that weigh at most ``limit``, by dynamic programming.

    ``best[end]`` is the lowest cost of the first ``end`` layers in the stages so far, and
    ``start_of[stage][end]`` is the latest start of the last of these stages that reaches it.
    """
    count = len(totals) - 1
    best: list[float] = [0, *[math.inf] * count]
    start_of: list[list[int]] = []
    for stage in range(parts):
        before, best, starts = best, [math.inf] * (count + 1), [0] * (count + 1)
        for end in range(stage + 1, count - (parts - stage - 1) + 1):
            for start in range(end - 1, stage - 1, -1):
                weight = totals[end] - totals[start]
                if weight > limit or cost(weight) >= best[end]:
                    break
                joined = join(before[start], cost(weight))
                if joined < best[end]:
                    best[end], starts[end] = joined, start
        start_of.append(starts)
    boundaries = [count]
    for starts in reversed(start_of):
        boundaries.append(starts[boundaries[-1]])
    return best[count], boundaries[::-1]
