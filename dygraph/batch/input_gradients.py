"""Gradients of a batch's inputs: of a trained prompt, say, or for an adversary.

Inputs that need a gradient are cut into micro-batches, or drawn, with their graph, which ends at a
stand-in of each. What these have got in the end is handed back to the script's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.dygraph.batch.micro_batches import MicroBatches, is_iterator, unwrapped
from fleetpipe.dygraph.nest import mapped
from fleetpipe.paddle_api import paddle

#: Each of a script's tensors with its stand-in.
Sources = list[tuple[Tensor, Tensor]]


def with_gradients(data: Nest) -> tuple[Nest, Sources]:
    """Returns a batch with stand-ins for the inputs that need a gradient, and these.

    Those of an iterator come as it is drawn from.
    """
    sources: Sources = []

    def stand_in(tensor: Tensor) -> Tensor:
        if tensor.stop_gradient:
            return tensor
        copy = tensor.detach()
        copy.stop_gradient = False
        sources.append((tensor, copy))
        return copy

    def pair(value: Nest) -> Nest:
        if not isinstance(value, (list, tuple)) or len(value) != 2:
            return value
        return [mapped(stand_in, value[0]), mapped(_cut_off, value[1])]

    data = unwrapped(data)
    return (_each(pair, data) if is_iterator(data) else pair(data)), sources


def _each(change: Callable[[Nest], Nest], iterator: Nest) -> Iterator[Nest]:
    """Yields what an iterator does, changed; it may have ``__next__`` and no ``__iter__``."""
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        yield change(item)


def without_gradients(batches: MicroBatches) -> MicroBatches:
    """Returns the micro-batches cut off from their stand-ins."""
    inputs = batches.inputs and [mapped(_cut_off, value) for value in batches.inputs]
    return batches._replace(inputs=inputs)


def _cut_off(tensor: Tensor) -> Tensor:
    return tensor if tensor.stop_gradient else tensor.detach()


def hand_back(sources: Sources, divisor: int) -> None:
    """Gives the script's tensors the gradients that their stand-ins have got."""
    reached: Sequence[tuple[Tensor, Tensor]] = [s for s in sources if s[1].grad is not None]
    if reached:
        gradients = [copy.grad if divisor == 1 else copy.grad / divisor for _, copy in reached]
        paddle.autograd.backward([tensor for tensor, _ in reached], gradients)
