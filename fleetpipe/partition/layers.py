"""A partition as a value: which layers each stage holds, and the table that shows it."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from fleetpipe.errors import PartitionError, nearest
from fleetpipe.partition.cuts import by_class, explicit, require_cover, uniform
from fleetpipe.partition.slowest import balanced
from fleetpipe.representation import shows, table

NAMES_WIDTH = 44


class LayerInfo(NamedTuple):
    """The facts about one layer that a cut depends on.

    Attributes:
        name: Its class name, or ``__name__`` of a function; "" if it has neither.
        parameters: How many numbers its trainable parameters hold; 0 for a layer without any.
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
        """How many numbers the trainable parameters of the stage hold."""
        return sum(layer.parameters for layer in self.layers)


@shows("boundaries", "method")
@dataclass(frozen=True)
class Partition:
    """A list of layers cut into stages; every layer is in one stage and no stage is empty.

    Attributes:
        boundaries: First layer of each stage, then the number of layers.
        method: How the cut was found, as the user said it.
        layers: All layers of the model, in order.
        may_be_empty: Whether a stage may have no layer, as for a batch that has nothing for it.

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
            for stage, (start, end) in enumerate(zip(self.boundaries, self.boundaries[1:]))
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
        """Draws the stages as a table: layers, their names, parameters and share of the whole.

        Args:
            rank_of: Gives the rank that holds a stage, such as ``rank_of`` of a placement; adds a
                column.

        Returns:
            Several lines without a newline at the end.
        """
        rows = list(self._rows(rank_of))
        title = f"seg_method {self.method}: {len(self.layers)} layers, stages: {len(self.stages)}"
        return f"{title}\n{table(rows, left=[rows[0].index('names')])}"

    def _rows(self, rank_of: Callable[[int], int] | None) -> Iterator[list[str]]:
        def row(stage: str, rank: str, *rest: str) -> list[str]:
            return [stage, *([] if rank_of is None else [rank]), *rest]

        total = sum(layer.parameters for layer in self.layers)
        yield row("stage", "rank", "layers", "names", "parameters", "share")
        for part in self.stages:
            yield row(
                str(part.stage),
                "" if rank_of is None else str(rank_of(part.stage)),
                f"{part.start}-{part.end - 1}" if part.end - part.start > 1 else str(part.start),
                _shorten(part.layers),
                f"{part.parameters:,}",
                f"{part.parameters / total:.1%}" if total else "-",
            )
        yield row("all", "", str(len(self.layers)), "", f"{total:,}", "")


def _shorten(layers: tuple[LayerInfo, ...]) -> str:
    """Joins names in order, repeated ones once with a count, in at most NAMES_WIDTH characters."""
    names = groupby(layer.name or "(none)" for layer in layers)
    counted = [(name, len(list(group))) for name, group in names]
    text = ", ".join(name if times == 1 else f"{name} x{times}" for name, times in counted)
    return text if len(text) <= NAMES_WIDTH else text[: NAMES_WIDTH - 4].rstrip(", ") + " ..."


METHODS = ("uniform", "layer:Regex", "balanced")


def segment(
    layers: Sequence[LayerInfo], parts: int, method: str | Sequence[int] = "uniform"
) -> Partition:
    """Cuts a model's layers into stages.

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
    boundaries = _boundaries(layers, parts, method)
    name = method if isinstance(method, str) else f"list {list(method)}"
    return Partition(tuple(boundaries), name, tuple(layers))


def _boundaries(
    layers: Sequence[LayerInfo], parts: int, method: str | Sequence[int]
) -> Sequence[int]:
    if not isinstance(method, str):
        return explicit(len(layers), parts, method)
    if method == "uniform":
        return uniform(len(layers), parts)
    if method in ("balanced", "parameters"):
        return balanced([layer.parameters for layer in layers], parts)
    kind, colon, regex = method.partition(":")
    if kind in ("layer", "type") and colon:
        return by_class([layer.name for layer in layers], parts, regex)
    raise PartitionError(
        f"unknown seg_method {method!r}",
        expected=", ".join(METHODS) + ", or a list with the first layer of each stage",
        got=repr(method),
        fix=nearest(method, METHODS),
    )
