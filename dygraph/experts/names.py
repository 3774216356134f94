"""What a layer has on one device, where this rank holds some of its experts."""

from __future__ import annotations

from collections.abc import Iterator

from fleetpipe.aliases import Layer, Tensor
from fleetpipe.dygraph.experts.layer import ExpertList
from fleetpipe.dygraph.experts.parameters import LIST
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import MoELayer


def number_experts(layer: Layer) -> None:
    """Gives the experts of Paddle's ``MoELayer`` their numbers among those of its group.

    Each rank counts its own from 0; layers of libraries have the numbers already.
    """
    for inner in layer.sublayers(include_self=True):
        if isinstance(inner, MoELayer) and inner.world_size > 1:
            experts = inner.experts
            if not isinstance(experts, ExpertList):
                count = len(experts)
                first, total = inner.group.rank * count, inner.world_size * count
                inner.experts = ExpertList(experts, first, total)


def whole_state(layer: Layer) -> dict[str, Tensor]:
    """Returns the names that parameters and buffers of a layer have on one device, in order.

    Beside that of an expert that is not here stands what one that is here has: all are alike.

    Args:
        layer: A layer whose experts have their numbers.
    """
    lists = {f"{path}.": numbers for path, numbers in _spread_lists(layer)}
    state = layer.state_dict()
    whole: dict[str, Tensor] = {}
    expanded: set[str] = set()
    for name, tensor in state.items():
        prefix = next((path for path in lists if name.startswith(path)), None)
        if prefix is None:
            whole[name] = tensor
        elif prefix not in expanded:
            expanded.add(prefix)
            here, total = lists[prefix]
            first = f"{prefix}{here[0]}."
            one = {n[len(first) :]: t for n, t in state.items() if n.startswith(first)}
            for expert in range(total):
                whole.update((f"{prefix}{expert}.{rest}", t) for rest, t in one.items())
    return whole


def spreads(layer: Layer) -> bool:
    """Whether some experts of a layer, or function, are on other ranks than others."""
    return isinstance(layer, paddle.nn.Layer) and any(_spread_lists(layer))


def _spread_lists(layer: Layer) -> Iterator[tuple[str, tuple[list[str], int]]]:
    """Yields the path of each list of experts that are not all here, their names, and how many."""
    for path, inner in layer.named_sublayers(include_self=True):
        if isinstance(inner, paddle.nn.LayerList) and path.rpartition(".")[2] == LIST:
            here = [name for name, _ in inner.named_children()]
            # Libraries' lists have None in the place of an expert that is not here.
            total = getattr(inner, "total", len(inner))
            if here and len(here) < total:
                yield path, (here, total)
