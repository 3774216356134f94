"""Gradients of a batch's inputs, for example of a trained prompt or for adversarial examples.

A detached copy, the stand-in, replaces each input that needs a gradient. Cutting the batch, or
drawing from it, keeps the graph back to the stand-ins. At the end of the batch the gradients of the
stand-ins are passed on to the script's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.dygraph.batch.micro_batches import MicroBatches, is_iterator, unwrap
from fleetpipe.dygraph.nest import map_tensors
from fleetpipe.paddle_api import paddle

#: Each of a script's tensors with its stand-in.
Sources = list[tuple[Tensor, Tensor]]


def with_gradients(data: Nest) -> tuple[Nest, Sources]:
    """Returns a batch in which stand-ins replace inputs that need a gradient, and these stand-ins.

    With an iterator, each stand-in is added when its micro-batch is drawn.
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
        return [map_tensors(stand_in, value[0]), map_tensors(_cut_off, value[1])]

    data = unwrap(data)
    return (_each(pair, data) if is_iterator(data) else pair(data)), sources


def _each(change: Callable[[Nest], Nest], iterator: Nest) -> Iterator[Nest]:
    """Yields ``change(item)`` for each item; the iterator needs only ``__next__``."""
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        yield change(item)


def without_gradients(batches: MicroBatches) -> MicroBatches:
    """Returns micro-batches whose inputs are detached from their stand-ins."""
    inputs = batches.inputs and [map_tensors(_cut_off, value) for value in batches.inputs]
    return batches._replace(inputs=inputs)


def _cut_off(tensor: Tensor) -> Tensor:
    return tensor if tensor.stop_gradient else tensor.detach()


def hand_back(sources: Sources, divisor: int) -> None:
    """Runs backward from the stand-ins' gradients into the script's tensors."""
    reached: Sequence[tuple[Tensor, Tensor]] = [s for s in sources if s[1].grad is not None]
    if reached:
        gradients = [copy.grad if divisor == 1 else copy.grad / divisor for _, copy in reached]
        paddle.autograd.backward([tensor for tensor, _ in reached], gradients)
