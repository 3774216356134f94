"""A call of a leaf layer as a graph of its own, which autograd runs twice: for I, and for W."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Callable, NamedTuple

from fleetpipe.aliases import Context, Tensor
from fleetpipe.dygraph.backward.leaf import Leaf
from fleetpipe.dygraph.backward.leaf_call import Call
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.tensor import tensor_bytes

#: Bytes of an output from which it is worth the time of two more nodes not to keep it.
_LARGE = 2**20

#: What a root gives where no value does.
_TOKEN = paddle.zeros([1])


class CallGraph(NamedTuple):
    """What one call of a layer computes.

    Attributes:
        inputs: The stand-ins that the outputs depend on.
        roots: Where backward starts: the outputs that have a gradient, or one tensor that stands
            for the only one of them.
    """

    inputs: list[Tensor]
    roots: list[Tensor]


class GraphCall(Call):
    """A call as a little graph, from its inputs to its outputs."""

    def __init__(
        self,
        leaf: Leaf,
        parameters: Sequence[Tensor],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> None:
        """Keeps the ends of the call's graph.

        Args:
            leaf: The layer.
            parameters: The layer's trainable parameters.
            inputs: The stand-ins that the outputs depend on.
            outputs: The outputs that have a gradient.
        """
        super().__init__(leaf, parameters, outputs)
        roots = list(outputs)
        self._stands = len(roots) == 1 and tensor_bytes(roots[0]) >= _LARGE
        if self._stands:
            # Else the output would be kept until W, though no operation may need it.
            stand: Callable[..., Tensor] = _Root.apply
            roots = [stand(self, roots[0])]
        self._graph: CallGraph | None = CallGraph(list(inputs), roots)
        #: Those of the parameters, where they had to be computed in I.
        self._computed: Sequence[Tensor] | None = None

    def measure(self, taken: Iterable[Tensor], outputs: Sequence[Tensor], allocated: int) -> None:
        """Notes what the call keeps, given that it left ``allocated`` bytes more in use."""
        returned = sum(map(tensor_bytes, outputs))
        kept = taken if self._stands else (*taken, *outputs)
        self.storages = {tensor.data_ptr(): tensor_bytes(tensor) for tensor in kept}
        self.hidden_bytes = max(allocated - returned, 0)

    def input_grads(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Returns the gradient of every input and keeps what the parameters' need.

        Args:
            grads: The gradients of the outputs; None for one that nobody used.
        """
        if self._graph is None:
            raise RuntimeError("backward ran twice through a call of a leaf layer")
        self.arrived, inputs = grads, self._graph.inputs
        if any(grad is not None and not grad.size for grad in grads):
            # Asked for one gradient of a product without rows, Paddle fails for want of the other.
            gradients = self._gradients([*inputs, *self.parameters], retain_graph=True)
            self._computed = gradients[len(inputs) :]
        else:
            gradients = self._gradients(inputs, retain_graph=True)
        # Paddle adds up gradients in place: one that lives in the memory of another is safe only
        # until the other is handed on.
        self.arrived = [_apart(grad, gradients) for grad in grads]
        self.storages.update((g.data_ptr(), tensor_bytes(g)) for g in self.arrived if g is not None)
        # None would crash Paddle where the input was made by an operation.
        return [
            paddle.zeros_like(tensor) if grad is None else grad
            for tensor, grad in zip(inputs, gradients)
        ]

    def weight_grads(self) -> list[tuple[Tensor, Tensor]]:
        """Returns the parameters that have a gradient, with it; frees the graph."""
        gradients = self._computed
        if gradients is None:
            gradients = self._gradients(self.parameters, retain_graph=False)
        self._graph, self._computed, self.arrived = None, None, ()
        return [(p, grad) for p, grad in zip(self.parameters, gradients) if grad is not None]

    def _gradients(self, wanted: Sequence[Tensor], retain_graph: bool) -> list[Tensor]:
        """Returns the gradient of each of ``wanted``, or None, from those of the outputs."""
        roots = [] if self._graph is None else self._graph.roots
        used = [(root, grad) for root, grad in zip(roots, self.arrived) if grad is not None]
        if not used or not wanted:
            return [None] * len(wanted)
        starts, grads = map(list, zip(*used))
        return list(
            paddle.grad(
                starts,
                list(wanted),
                None if self._stands else grads,
                retain_graph=retain_graph,
                allow_unused=True,
            )
        )


class _Root(paddle.autograd.PyLayer):
    """Stands at the end of a call's graph, and gives it the gradient that has arrived."""

    @staticmethod
    def forward(ctx: Context, call: Call, _output: Tensor) -> Tensor:
        ctx.call = weakref.ref(call)
        return _TOKEN.detach()

    @staticmethod
    def backward(ctx: Context, _token: Tensor) -> Tensor:
        return ctx.call().arrived[0]


def _apart(tensor: Tensor, tensors: Iterable[Tensor]) -> Tensor:
    """Returns ``tensor``, or a copy if one of ``tensors`` shares its memory."""
    if tensor is None or not any(_overlap(tensor, other) for other in tensors if other is not None):
        return tensor
    return tensor.clone()


def _overlap(tensor: Tensor, other: Tensor) -> bool:
    low, high = sorted((tensor, other), key=lambda either: int(either.data_ptr()))
    return bool(high.data_ptr() < low.data_ptr() + tensor_bytes(low))
