"""Finds the cut whose slowest stage is as fast as possible, for any cost of a stage.

The cost of a stage need not be the sum of its layers' costs: it may count what the stage receives,
and is infinite for a stage that does not fit into memory. Dynamic programming over the possible
places finds the exact answer in three steps, so that it is the same everywhere:

1. the costliest stage costs as little as possible;
2. among such cuts, the sum of the squared costs of the stages is smallest: the stages that are not
   the costliest are even, too;
3. among those, every cut stands as late as possible, the last cut first: layers that cost nothing
   (activations, pooling, reshaping) stay with the layer before them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from fleetpipe.errors import PartitionError
from fleetpipe.partition.cuts import require_enough

#: By how much of the least cost a cut may be slower that sends less.
SLACK = 0.05

#: ``cost(stage, start, end)`` of the layers ``start`` to ``end - 1`` as that stage.
Cost = Callable[[int, int, int], float]
#: ``floor(start, end)``: at most what they cost as any stage; more layers have no lower one.
Floor = Callable[[int, int], float]


class Bottleneck(NamedTuple):
    """A cut, and how slow its slowest stage is.

    Attributes:
        boundaries: First layer of each stage, then the number of layers.
        cost: The cost of the slowest stage.
    """

    boundaries: tuple[int, ...]
    cost: float


def _no_floor(_start: int, _end: int) -> float:
    return -math.inf


def balanced(weights: Sequence[int], parts: int) -> list[int]:
    """Cuts so that the heaviest stage is as light as possible; the module says how ties are broken.

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
    count = len(weights)
    require_enough(count, parts, "balanced")
    for layer, weight in enumerate(weights):
        if weight < 0:
            raise PartitionError(
                "a layer cannot weigh less than nothing",
                where=f"layer {layer}",
                got=str(weight),
                fix="give weights of 0 or more",
            )
    totals = [0, *accumulate(weights)]

    def weigh(start: int, end: int) -> int:
        return totals[end] - totals[start]

    cut = fastest(range(1, count), count, parts, lambda _, *layers: weigh(*layers), weigh)
    return list(cut.boundaries)


def fastest(
    places: Sequence[int],
    count: int,
    parts: int,
    cost: Cost,
    floor: Floor = _no_floor,
    sent: Callable[[int], float] | None = None,
) -> Bottleneck:
    """Cuts so that the costliest stage costs as little as possible.

    Takes about ``parts * len(places) ** 2`` calls of ``cost``, twice; with a good ``floor`` far
    fewer.

    Args:
        places: The layers with which a stage may begin, ascending, without the first layer.
        count: Number of layers.
        parts: Number of stages.
        cost: Returns the cost of a stage; ``math.inf`` for one that is impossible.
        floor: Returns a lower bound of the cost of some layers. It changes no cut.
        sent: Returns how much crosses the border before a layer. Measured costs vary, so that cuts
            at most ``SLACK`` slower than the fastest count as equal: the one that sends least is
            taken.

    Returns:
        The cut and its cost.

    Raises:
        PartitionError: There are too few places, or every cut has an impossible stage.
    """
    if len(places) + 1 < parts:
        raise PartitionError(
            f"{parts} stages need {parts - 1} places to cut at",
            got=f"{len(places)} places",
            fix="use fewer ranks or chunks",
        )
    bounds = [0, *places, count]
    lowest = _cut(bounds, parts, cost, max, floor)[1]
    if math.isinf(lowest):
        raise PartitionError(
            "no cut has stages that all fit into memory",
            got=f"{count} layers, {len(places)} places to cut at, {parts} stages",
            fix="raise the limit of memory, or use more ranks",
        )

    most = lowest if sent is None else (1 + SLACK) * lowest

    def second(stage: int, start: int, end: int) -> float:
        seconds = cost(stage, start, end)
        if seconds > most:
            return math.inf
        return seconds**2 if sent is None else sent(start)

    def second_floor(start: int, end: int) -> float:
        seconds = floor(start, end)
        if seconds > most:
            return math.inf
        return max(seconds, 0) ** 2 if sent is None else 0.0

    boundaries, _ = _cut(bounds, parts, second, lambda before, one: before + one, second_floor)
    stages = enumerate(pairwise(boundaries))
    return Bottleneck(boundaries, max(cost(stage, *bounds) for stage, bounds in stages))


def _cut(
    bounds: Sequence[int],
    parts: int,
    cost: Cost,
    join: Callable[[float, float], float],
    floor: Floor,
) -> tuple[tuple[int, ...], float]:
    """Returns the cut with the lowest joined cost.

    ``best[end]`` is the cost of the layers before ``bounds[end]`` in the stages so far, and
    ``start_of[stage][end]`` the latest start of the last of these stages that reaches it.
    """
    last = len(bounds) - 1
    # Sums of whole numbers stay exact, however large they are.
    best: list[float] = [0, *[math.inf] * last]
    start_of: list[list[int]] = []
    for stage in range(parts):
        before, best, starts = best, [math.inf] * (last + 1), [0] * (last + 1)
        ends = range(stage + 1, last - (parts - stage - 1) + 1)
        for end in ends if stage < parts - 1 else (last,):
            for start in range(end - 1, stage - 1, -1):
                if floor(bounds[start], bounds[end]) >= best[end]:
                    # Neither would this stage do better with more layers, whatever is before it.
                    break
                if before[start] < best[end]:
                    joined = join(before[start], cost(stage, bounds[start], bounds[end]))
                    if joined < best[end]:
                        best[end], starts[end] = joined, start
        start_of.append(starts)
    indices = [last]
    for starts in reversed(start_of):
        indices.append(starts[indices[-1]])
    return tuple(bounds[index] for index in reversed(indices)), best[last]
