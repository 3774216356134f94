"""From what a user writes as ``seg_method`` to a partition."""

from __future__ import annotations

from collections.abc import Sequence

from fleetpipe.errors import PartitionError, nearest
from fleetpipe.partition.cuts import by_class, explicit, uniform
from fleetpipe.partition.layers import LayerInfo, Partition
from fleetpipe.partition.slowest import balanced

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
            does. ``"balanced"``: the heaviest stage has as few parameters as possible.

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
    if method == "balanced":
        return balanced([layer.parameters for layer in layers], parts)
    kind, colon, regex = method.partition(":")
    if kind == "layer" and colon:
        return by_class([layer.name for layer in layers], parts, regex)
    raise PartitionError(
        f"unknown seg_method {method!r}",
        expected=", ".join(METHODS) + ", or a list with the first layer of each stage",
        got=repr(method),
        fix=nearest(method, METHODS),
    )
