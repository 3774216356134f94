"""Cuts a list of layers into stages; needs no Paddle. Start with :func:`segment`.

A cut is a list of *boundaries*: ``parts + 1`` layer numbers, the first 0, the last the number of
layers; stage ``s`` holds the layers ``boundaries[s]`` to ``boundaries[s + 1] - 1``. Fleet cuts
evenly, by class name, or by a given list. :func:`fastest` also finds, by dynamic programming, the
exact cut whose slowest stage is as fast as possible, for any cost of a stage: one that counts what
the stage receives, and is infinite for a stage that does not fit into memory. Its result is the
same everywhere:

1. the costliest stage costs as little as possible;
2. among such cuts, the sum of the squared costs of the stages is smallest: the stages that are not
   the costliest are even, too;
3. among those, every boundary is as late as possible, the last one first: layers that cost nothing
   (activations, pooling, reshaping) stay with the layer before them.
"""

from __future__ import annotations

import bisect
import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from fleetpipe.errors import PartitionError, nearest
from fleetpipe.representation import shows, table

__all__ = [
    "segment",
    "uniform",
    "by_class",
    "explicit",
    "balanced",
    "fastest",
    "Bottleneck",
    "LayerInfo",
    "Partition",
    "StageRange",
]

#: The share of the least cost by which a cut that sends less may be slower.
SLACK = 0.05

#: ``cost(stage, start, end)``: the cost of the layers ``start`` to ``end - 1`` as that stage.
Cost = Callable[[int, int, int], float]
#: ``floor(start, end)``: a lower bound of the cost of these layers as any stage, which does not
#: fall when layers are added.
Floor = Callable[[int, int], float]

#: The width of the column of names in a table, in characters.
NAMES_WIDTH = 44

#: The methods of :func:`segment` that are given by name.
METHODS = ("uniform", "layer:Regex", "balanced")


def uniform(count: int, parts: int) -> list[int]:
    """Returns a cut into stages of equal length; a remainder goes to the last stages, one each.

    Args:
        count: Number of layers.
        parts: Number of stages: ranks times chunks.

    Returns:
        The boundaries: 10 layers in 4 stages give ``[0, 2, 4, 7, 10]``.

    Raises:
        PartitionError: There are fewer layers than stages.
    """
    require_enough(count, parts, "uniform")
    size, remainder = divmod(count, parts)
    short = parts - remainder
    return [stage * size + max(0, stage - short) for stage in range(parts + 1)]


def by_class(names: Sequence[str], parts: int, regex: str) -> list[int]:
    """Returns a cut with equally many layers of a class in each stage.

    It cuts right after every k-th layer whose class name matches, k the same for each stage. Layers
    before the first match belong to stage 0, other layers after a boundary to the stage that begins
    there, and those after the last match to the last stage.

    Args:
        names: Class name of each layer, or ``__name__`` of a function; "" for a layer without a
            name, which never matches.
        parts: Number of stages: ranks times chunks.
        regex: Regular expression, searched anywhere in the name, whatever the case.

    Returns:
        The boundaries: names ``E B B B B H``, 2 stages, ``"B"`` give ``[0, 3, 6]``.

    Raises:
        PartitionError: The expression is not valid, matches nothing, or matches a number of layers
            that the stages do not divide.
    """
    method = f"layer:{regex}"
    require_enough(len(names), parts, method)
    matches = [index for index, name in enumerate(names) if name and _matches(regex, name)]
    if not matches:
        raise PartitionError(
            f"seg_method {method!r} matches no layer",
            expected=f"a number of matches that {parts} stages divide",
            got="the names " + ", ".join(sorted({name or "(none)" for name in names})),
            fix="name a class of the layers list, as in 'layer:TransformerBlock'",
        )
    per_stage, remainder = divmod(len(matches), parts)
    if remainder:
        raise PartitionError(
            f"the {len(matches)} layers that seg_method {method!r} matches cannot be shared evenly",
            expected=f"a number of matches divisible by the {parts} stages (ranks times chunks)",
            got=f"{len(matches)} matches, remainder {remainder}",
            fix="choose a number of stages that divides the matches, or seg_method 'balanced'",
        )
    last_of_stage = matches[per_stage - 1 : -1 : per_stage]
    return [0, *(index + 1 for index in last_of_stage), len(names)]


def _matches(regex: str, name: str) -> bool:
    """Returns whether a name matches the user's expression; refuses an invalid expression."""
    try:
        return re.search(regex, name, re.IGNORECASE) is not None
    except re.error as error:
        raise PartitionError(
            f"seg_method 'layer:{regex}' is not a regular expression",
            got=str(error),
            fix="escape the characters that are special, as in 'layer:Block\\('",
        ) from error


def explicit(count: int, parts: int, bounds: Sequence[int]) -> list[int]:
    """Returns the cut that the user gives as a list, after checking it.

    Args:
        count: Number of layers.
        parts: Number of stages: ranks times chunks.
        bounds: First layer of each stage; the number of layers may follow at the end.

    Returns:
        The boundaries: 10 layers, 3 stages, ``[0, 3, 7]`` give ``[0, 3, 7, 10]``.

    Raises:
        PartitionError: The list has the wrong length, does not begin with 0 or end with ``count``,
            is not in order, or leaves a stage empty.
    """
    method = f"list {list(bounds)}"
    require_enough(count, parts, method)
    if len(bounds) not in (parts, parts + 1):
        raise PartitionError(
            f"seg_method {method} has the wrong length",
            expected=f"{parts} numbers (the first layer of each of {parts} stages), or "
            f"{parts + 1} with the number of layers, {count}, at the end",
            got=f"{len(bounds)} numbers",
            fix="give one number per stage; stages are ranks times chunks",
        )
    boundaries = [_layer_number(bound, method) for bound in bounds]
    if len(boundaries) == parts:
        boundaries.append(count)
    require_cover(boundaries, count, method)
    return boundaries


def _layer_number(bound: object, method: str) -> int:
    """Returns a number of the user's list as an int; ``method`` names the list in the error."""
    try:
        if isinstance(bound, bool):
            raise TypeError
        return operator.index(bound)  # type: ignore[arg-type]
    except TypeError:
        raise PartitionError(
            f"seg_method {method} holds something that is not a layer number",
            expected="integers",
            got=f"{bound!r} of type {type(bound).__name__}",
            fix="give the number of the first layer of each stage, as in [0, 3, 7]",
        ) from None


def require_enough(count: int, parts: int, method: str) -> None:
    """Refuses a number of stages that is below one or above the number of layers.

    Args:
        count: Number of layers.
        parts: Number of stages.
        method: The method of the cut, for the error.
    """
    if parts < 1:
        raise PartitionError(
            "the number of stages must be at least 1",
            got=f"{parts} stages",
            fix="set pp_degree and num_virtual_pipeline_stages to 1 or more",
        )
    if count < parts:
        # The stage without a layer: an even cut gives the remainder to the last stages.
        empty = 0 if method == "uniform" else count
        raise PartitionError(
            f"stage {empty} would be empty: {count} layers cannot fill {parts} stages",
            where=f"stage {empty}, seg_method {method!r}",
            expected="at least one layer per stage (ranks times chunks)",
            got=f"{count} layers, {parts} stages",
            fix="use fewer ranks or chunks, or list the model's layers more finely",
        )


def require_cover(boundaries: Sequence[int], count: int, method: str) -> None:
    """Refuses boundaries that lose a layer, hold one twice or leave a stage empty.

    Args:
        boundaries: First layer of each stage, then the end of the last stage.
        count: Number of layers that the stages must hold, each once and in order.
        method: The method that made the boundaries, for the message.
    """
    expected = f"numbers that begin with 0, rise strictly and end with {count}, all the layers"
    got = f"boundaries {list(boundaries)} for {count} layers"
    if boundaries[0] != 0:
        raise PartitionError(
            f"the layers before layer {boundaries[0]} belong to no stage",
            where=f"stage 0, seg_method {method!r}",
            expected=expected,
            got=got,
            fix="begin the list with 0",
        )
    for stage, (start, end) in enumerate(pairwise(boundaries)):
        if start >= end:
            fault = "would be empty" if start == end else "would end before it begins"
            raise PartitionError(
                f"stage {stage} {fault}: from layer {start} up to, not including, layer {end}",
                where=f"stage {stage}, seg_method {method!r}",
                expected=expected,
                got=got,
                fix="put the numbers in order, each once, and leave every stage at least one layer",
            )
    if boundaries[-1] != count:
        raise PartitionError(
            f"the stages end at layer {boundaries[-1]}, the model at layer {count}",
            where=f"stage {len(boundaries) - 2}, seg_method {method!r}",
            expected=expected,
            got=got,
            fix=f"end the list with {count}, or leave the end out: one number for each stage",
        )


class Bottleneck(NamedTuple):
    """A cut, and how slow its slowest stage is.

    Attributes:
        boundaries: First layer of each stage, then the number of layers.
        cost: The cost of the slowest stage.
    """

    boundaries: tuple[int, ...]
    cost: float


def balanced(weights: Sequence[int], parts: int) -> list[int]:
    """Returns the cut whose heaviest stage is as light as possible.

    Of such cuts it takes the most even one, and of those the one with the latest boundaries. Takes
    about ``parts * len(weights) ** 2`` steps at worst.

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
        """Returns the weight of the layers ``start`` to ``end - 1``."""
        return totals[end] - totals[start]

    cut = fastest(range(1, count), count, parts, lambda _, *layers: weigh(*layers), weigh)
    return list(cut.boundaries)


def fastest(
    places: Sequence[int],
    count: int,
    parts: int,
    cost: Cost,
    floor: Floor = lambda _start, _end: -math.inf,
    sent: Callable[[int], float] | None = None,
) -> Bottleneck:
    """Returns the cut whose costliest stage costs as little as possible.

    Takes about ``parts * len(places) ** 2`` calls of ``cost``, twice; with a good ``floor`` far
    fewer.

    Args:
        places: The layers with which a stage may begin, ascending, without the first layer.
        count: Number of layers.
        parts: Number of stages.
        cost: Returns the cost of a stage; ``math.inf`` for one that is impossible.
        floor: Returns a lower bound of the cost of some layers. It changes no cut.
        sent: Returns how much is sent if a stage begins with a layer; None: nothing is known of
            that. Since measured costs vary, cuts at most ``SLACK`` slower than the fastest count as
            equal: of these, the cut that sends least is taken.

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
    _, lowest = _lowest_cost_cut(bounds, parts, cost, max, floor)
    if math.isinf(lowest):
        raise PartitionError(
            "no cut has stages that all fit into memory",
            got=f"{count} layers, {len(places)} places to cut at, {parts} stages",
            fix="raise the limit of memory, or use more ranks",
        )

    # Of the cuts whose costliest stage costs at most this, the second search takes the one with the
    # lowest sum of the squared costs of its stages or, with ``sent``, of what is sent to them.
    limit = lowest if sent is None else (1 + SLACK) * lowest

    def second_cost(stage: int, start: int, end: int) -> float:
        """Returns the stage's squared cost, or what is sent to it; infinite above the limit."""
        stage_cost = cost(stage, start, end)
        if stage_cost > limit:
            return math.inf
        return stage_cost**2 if sent is None else sent(start)

    def second_floor(start: int, end: int) -> float:
        """Returns a lower bound of ``second_cost`` of some layers, from their ``floor``."""
        lower_bound = floor(start, end)
        if lower_bound > limit:
            return math.inf
        return max(lower_bound, 0) ** 2 if sent is None else 0.0

    boundaries, _ = _lowest_cost_cut(bounds, parts, second_cost, operator.add, second_floor)
    stages = enumerate(pairwise(boundaries))
    return Bottleneck(boundaries, max(cost(stage, *bounds) for stage, bounds in stages))


def _lowest_cost_cut(
    bounds: Sequence[int],
    parts: int,
    cost: Cost,
    join: Callable[[float, float], float],
    floor: Floor,
) -> tuple[tuple[int, ...], float]:
    """Returns the boundaries of the cut with the lowest cost, and that cost.

    In the body, ``best[end]`` is the lowest cost of the layers before ``bounds[end]``, cut into the
    stages up to ``stage``; ``before[end]`` is the same for the stages before ``stage``. The cost
    ``best[end]`` is reached if ``stage`` begins with ``bounds[start_of[stage][end]]``: the latest
    such start.

    Args:
        bounds: The layers at which a stage may begin or end, ascending.
        parts: The number of stages.
        cost: Returns the cost of a stage; ``math.inf`` for one that is impossible.
        join: Returns the cost of a stage and those before it, from the two costs: ``max`` or a sum.
        floor: Returns a lower bound of the cost of some layers.
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
                    # Nor is this stage better with more layers, whatever precedes it.
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


class LayerInfo(NamedTuple):
    """The facts about one layer that a cut depends on.

    Attributes:
        name: The layer's class name, or ``__name__`` of a function; "" if it has neither.
        parameters: The number of elements of its trainable parameters.
    """

    name: str
    parameters: int = 0


@shows("stage", "start", "end")
@dataclass(frozen=True)
class StageRange:
    """The layers ``start`` to ``end - 1`` of the model, which form one stage.

    Attributes:
        stage: Global stage number.
        start: Global number of its first layer.
        end: Global number of the layer after its last.
        layers: The layers themselves, in order.
    """

    stage: int
    start: int
    end: int
    layers: tuple[LayerInfo, ...]

    @property
    def parameters(self) -> int:
        """The number of elements of the stage's trainable parameters."""
        return sum(layer.parameters for layer in self.layers)


@shows("boundaries", "method")
@dataclass(frozen=True)
class Partition:
    """A list of layers cut into stages; every layer is in one stage and no stage is empty.

    Attributes:
        boundaries: First layer of each stage, then the number of layers.
        method: The method that found the cut, as in :func:`segment`.
        layers: All layers of the model, in order.
        may_be_empty: Whether a stage may have no layer, as in a cut for a batch that skips layers.

    Raises:
        PartitionError: The boundaries lose a layer, hold one twice, or leave a stage empty.
    """

    boundaries: tuple[int, ...]
    method: str
    layers: tuple[LayerInfo, ...]
    may_be_empty: bool = False

    def __post_init__(self) -> None:
        if len(self.boundaries) < 2:
            raise PartitionError(
                "a partition needs at least one stage",
                expected="two boundaries or more, such as (0, number of layers)",
                got=f"boundaries {list(self.boundaries)}",
                fix=f"give [0, {len(self.layers)}] for a single stage",
            )
        if not self.may_be_empty:
            require_cover(self.boundaries, len(self.layers), self.method)

    @property
    def stages(self) -> tuple[StageRange, ...]:
        """The stages in the order of the model."""
        return tuple(
            StageRange(stage, start, end, self.layers[start:end])
            for stage, (start, end) in enumerate(pairwise(self.boundaries))
        )

    def stage_of(self, layer: int) -> int:
        """Returns the stage that holds a layer, both by their global numbers.

        Raises:
            PartitionError: The model has no such layer.
        """
        if not 0 <= layer < len(self.layers):
            raise PartitionError(
                f"there is no layer {layer}", fix=f"give a number from 0 to {len(self.layers) - 1}"
            )
        return bisect.bisect_right(self.boundaries, layer) - 1

    def range_of(self, stage: int) -> range:
        """Returns the global numbers of the layers of a stage."""
        return range(*self.boundaries[stage : stage + 2])

    def table(self, rank_of: Callable[[int], int] | None = None) -> str:
        """Returns a table of the stages: layers, their names, parameters and share of all of these.

        Args:
            rank_of: Returns the rank of a stage, such as ``rank_of`` of a placement; None for a
                table without ranks.

        Returns:
            Several lines without a newline at the end.
        """
        rows = list(self._table_rows(rank_of))
        title = f"seg_method {self.method}: {len(self.layers)} layers, stages: {len(self.stages)}"
        return f"{title}\n{table(rows, left=[rows[0].index('names')])}"

    def _table_rows(self, rank_of: Callable[[int], int] | None) -> Iterator[list[str]]:
        """Yields the cells of the table's heading, of each stage and of the whole model."""

        def row(stage: str, rank: str, *rest: str) -> list[str]:
            """Returns the cells of a line, without that of the rank if there are no ranks."""
            return [stage, *([] if rank_of is None else [rank]), *rest]

        total = sum(layer.parameters for layer in self.layers)
        yield row("stage", "rank", "layers", "names", "parameters", "share")
        for stage in self.stages:
            last = stage.end - 1
            yield row(
                str(stage.stage),
                "" if rank_of is None else str(rank_of(stage.stage)),
                f"{stage.start}-{last}" if last > stage.start else str(stage.start),
                _names_in_short(stage.layers),
                f"{stage.parameters:,}",
                f"{stage.parameters / total:.1%}" if total else "-",
            )
        yield row("all", "", str(len(self.layers)), "", f"{total:,}", "")


def _names_in_short(layers: tuple[LayerInfo, ...]) -> str:
    """Returns the names of layers in order, such as "Embed, Block x3", cut at NAMES_WIDTH letters.

    A name that follows itself is written once, with a count.
    """
    names = groupby(layer.name or "(none)" for layer in layers)
    counted = [(name, len(list(group))) for name, group in names]
    text = ", ".join(name if times == 1 else f"{name} x{times}" for name, times in counted)
    return text if len(text) <= NAMES_WIDTH else text[: NAMES_WIDTH - 4].rstrip(", ") + " ..."


def segment(
    layers: Sequence[LayerInfo], parts: int, method: str | Sequence[int] = "uniform"
) -> Partition:
    """Returns a cut of a model's layers into stages.

    Args:
        layers: The model's layers, in order.
        parts: Number of stages: ranks times chunks.
        method: ``"uniform"``: as many layers in each stage; ``"layer:Regex"``: as many layers whose
            class name matches; a list: the first layer of each stage; these three cut as Fleet
            does. ``"balanced"``: the heaviest stage has as few parameters as possible. DeepSpeed's
            ``"parameters"`` and ``"type:Regex"`` are other names of two of them.

    Returns:
        The partition, in which every layer is in one stage and no stage is empty.

    Raises:
        PartitionError: The method is unknown, or cannot cut these layers into that many stages.

    Example:
        >>> layers = [LayerInfo("Conv2D", 80), LayerInfo("ReLU"), LayerInfo("Linear", 330)]
        >>> segment(layers, 2, "balanced").boundaries
        (0, 2, 3)
    """
    if not isinstance(method, str):
        boundaries = explicit(len(layers), parts, method)
        return Partition(tuple(boundaries), f"list {list(method)}", tuple(layers))
    kind, colon, regex = method.partition(":")
    if method == "uniform":
        boundaries = uniform(len(layers), parts)
    elif method in ("balanced", "parameters"):
        boundaries = balanced([layer.parameters for layer in layers], parts)
    elif kind in ("layer", "type") and colon:
        boundaries = by_class([layer.name for layer in layers], parts, regex)
    else:
        raise PartitionError(
            f"unknown seg_method {method!r}",
            expected=", ".join(METHODS) + ", or a list with the first layer of each stage",
            got=repr(method),
            fix=nearest(method, METHODS),
        )
    return Partition(tuple(boundaries), method, tuple(layers))
