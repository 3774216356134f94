"""The buffers that no state dict has: ``persistable=False``, and every tensor set as an attribute.

They go by the number of their layer in the whole list and their path in it, ``3.mask``; those of a
layer that several entries share go by each of the entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.dygraph.layers.tied import called_through
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import state_slots
from fleetpipe.paddle_api.tensor import has_memory

#: Where a buffer is: the dict that holds it, and its name in there.
Place = tuple[dict[str, Tensor], str]


def hidden_buffers(functions: Mapping[int, Callable[[Nest], Nest]]) -> dict[str, Place]:
    """Returns the places of the hidden buffers of some layers.

    Args:
        functions: Layers and functions by their number in the whole list.
    """
    return {
        f"{index}.{path}": place
        for index, function in functions.items()
        for layer in (function, *called_through(function))
        if isinstance(layer, paddle.nn.Layer)
        for path, place in _of_layer(layer)
    }


def _of_layer(layer: Layer) -> Iterator[tuple[str, Place]]:
    keys = layer.state_dict().keys()
    for prefix, part in layer.named_sublayers(include_self=True):
        for holder, name in state_slots(part):
            path = f"{prefix}.{name}" if prefix else name
            if path not in keys and has_memory(holder[name]):
                yield path, (holder, name)
