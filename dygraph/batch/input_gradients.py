"""Gradients of a batch's inputs: of a trained prompt, say, or for an adversary.

Inputs of a whole batch that need a gradient are cut into micro-batches with their graph, which ends
at a stand-in of each. What these have got in the end is handed back to the script's tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.dygraph.batch.micro_batches import MicroBatches
from fleetpipe.dygraph.nest import mapped
from fleetpipe.paddle_api import paddle

#: Each of a script's tensors with its stand-in.
Sources = list[tuple[Tensor, Tensor]]


def with_gradients(data: Nest) -> tuple[Nest, Sources]:
    """Returns a batch with stand-ins for the inputs that need a gradient, and these."""
    sources: Sources = []

    def stand_in(tensor: Tensor) -> Tensor:
        if tensor.stop_gradient:
            return tensor
        copy = tensor.detach()
        copy.stop_gradient = False
        sources.append((tensor, copy))
        return copy

    if not isinstance(data, (list, tuple)) or len(data) != 2:
        return data, sources
    inputs, labels = data
    return [mapped(stand_in, inputs), mapped(_cut_off, labels)], sources


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
