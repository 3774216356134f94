"""Cuts one call of a layer out of the graph around it, so that its weight gradient can wait.

A leaf layer runs on stand-ins for its inputs. What it returns goes on through ``_Border``, whose
backward asks the layer's own little graph for the gradients of the inputs alone and keeps the
gradients of the outputs. ``Call.weight_grads`` asks the same graph for the rest. This is the split
of backward in Zero Bubble Pipeline Parallelism (arXiv:2401.10241; its B and W are I and W here)
with nothing but ``PyLayer`` and ``paddle.grad``.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Callable, NamedTuple

from fleetpipe._paddle import paddle
from fleetpipe.aliases import Context, Tensor
from fleetpipe.dygraph.backward.adding import Sums

#: Bytes of an output from which it is worth the time of two more nodes not to keep it.
_LARGE = 2**20


class Graph(NamedTuple):
    """What one call of a layer computes.

    Attributes:
        inputs: The stand-ins that the outputs depend on.
        roots: Where backward starts: the outputs that have a gradient, or one tensor that stands
            for the only one of them.
    """

    inputs: list[Tensor]
    roots: list[Tensor]


class Call:
    """One call of a leaf layer: its own little graph, from its inputs to its outputs."""

    def __init__(
        self, parameters: Sequence[Tensor], inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        """Keeps the ends of the call's graph.

        Args:
            parameters: The layer's trainable parameters.
            inputs: The stand-ins that the outputs depend on.
            outputs: The outputs that have a gradient.
        """
        #: The layer's trainable parameters.
        self.parameters = list(parameters)
        #: The gradients of the outputs, on their way from one side of the border to the other, and
        #: then until W. None for one that nobody used.
        self.arrived: Sequence[Tensor] = ()
        self._leaving: Sequence[Tensor] = outputs
        roots = list(outputs)
        self._stands = len(roots) == 1 and bytes_of(roots[0]) >= _LARGE
        if self._stands:
            # Else the output would be kept until W, though no operation may need it.
            stand: Callable[..., Tensor] = _Root.apply
            roots = [stand(self, roots[0])]
        self._graph: Graph | None = Graph(list(inputs), roots)
        #: Bytes by address: what the layer took and gave, and the gradients of that.
        self.storages: dict[int, int] = {}
        self.hidden_bytes = 0

    def measure(self, taken: Iterable[Tensor], outputs: Sequence[Tensor], allocated: int) -> None:
        """Notes what the call keeps, given that it left ``allocated`` bytes more in use."""
        returned = sum(map(bytes_of, outputs))
        kept = taken if self._stands else (*taken, *outputs)
        self.storages = {tensor.data_ptr(): bytes_of(tensor) for tensor in kept}
        self.hidden_bytes = max(allocated - returned, 0)

    def leave(self) -> tuple[Tensor, ...]:
        """Returns the outputs for the graph around the call; to be called once."""
        leaving, self._leaving = self._leaving, ()
        return tuple(output.detach() for output in leaving)

    def input_grads(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Returns the gradient of every input and keeps what the parameters' need.

        Args:
            grads: The gradients of the outputs; None for one that nobody used.
        """
        if self._graph is None:
            raise RuntimeError("backward ran twice through a call of a leaf layer")
        self.arrived, inputs = grads, self._graph.inputs
        found = self._found_in_i(inputs)
        # Paddle adds up gradients in place: one that lives in the memory of another is safe only
        # until the other is handed on.
        self.arrived = [_apart(grad, found) for grad in grads]
        self._note_kept()
        # None would crash Paddle where the input was made by an operation.
        return [
            paddle.zeros_like(tensor) if grad is None else grad
            for tensor, grad in zip(inputs, found)
        ]

    def _found_in_i(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Returns the gradients of ``inputs``."""
        return self._gradients(inputs, retain_graph=True)

    def _note_kept(self) -> None:
        """Notes what is kept from I to W."""
        self.storages.update((g.data_ptr(), bytes_of(g)) for g in self.arrived if g is not None)

    def weight_grads(self) -> list[tuple[Tensor, Tensor]]:
        """Returns the parameters that have a gradient, with it; frees the graph."""
        found = self._gradients(self.parameters, retain_graph=False)
        self._graph, self.arrived = None, ()
        return [(p, grad) for p, grad in zip(self.parameters, found) if grad is not None]

    def add_weight_grads(self, sums: Sums) -> None:
        """Adds the gradients of the parameters to ``sums``; frees the graph."""
        sums.add(self.weight_grads())

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


class _Border(paddle.autograd.PyLayer):
    """Stands for a call of at most one operation in the graph around it."""

    @staticmethod
    def forward(ctx: Context, call: Call, tape: list[Call], *_inputs: Tensor) -> Tensor:
        ctx.call, ctx.tape = call, tape
        ctx.set_materialize_grads(False)
        return call.leave()

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Tensor:
        return _entered(ctx.call, ctx.tape, grads)


class _Entry(paddle.autograd.PyLayer):
    """The border of a longer call on the side of its inputs."""

    @staticmethod
    def forward(ctx: Context, call: Call, tape: list[Call], *_inputs: Tensor) -> Tensor:
        ctx.call, ctx.tape = call, tape
        return _TOKEN.detach()

    @staticmethod
    def backward(ctx: Context, _token: Tensor) -> Tensor:
        return _entered(ctx.call, ctx.tape, ctx.call.arrived)


class _Exit(paddle.autograd.PyLayer):
    """The border of a longer call on the side of its outputs."""

    @staticmethod
    def forward(ctx: Context, call: Call, _token: Tensor) -> Tensor:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return call.leave()

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Tensor:
        ctx.call.arrived = grads
        return _TOKEN


def _entered(call: Call, tape: list[Call], grads: Sequence[Tensor]) -> Tensor:
    """Returns the gradients of a call's inputs, and notes that the rest can be asked for."""
    found = call.input_grads(grads) or [_TOKEN]
    tape.append(call)
    return tuple(found) if len(found) > 1 else found[0]


def bordered(call: Call, tape: list[Call], depth: int, entries: Sequence[Tensor]) -> Tensor:
    """Puts a call into the graph around it, as far from its outputs to its inputs as ``depth``.

    Autograd runs the operations that are ready in the order in which they became so, and adds up
    gradients as they arrive. With as many nodes in its place as a call has operations, what others
    add to the gradients of its inputs comes before or after its own as it would without a border.
    """
    apply: Callable[..., Tensor] = _Border.apply
    if depth < 2:
        return apply(call, tape, *(entries or [_ANCHOR]))
    enter: Callable[..., Tensor] = _Entry.apply
    token = enter(call, tape, *entries)
    for _ in range(depth - 2):
        token = paddle.scale(token)
    leave: Callable[..., Tensor] = _Exit.apply
    return leave(call, token)


def _one_zero(stop_gradient: bool) -> Tensor:
    tensor = paddle.zeros([1])
    tensor.stop_gradient = stop_gradient
    return tensor


#: What makes the output of a layer without differentiable inputs, such as Embedding, need one, and
#: what crosses the border where no value does.
_ANCHOR, _TOKEN = _one_zero(False), _one_zero(True)


def bytes_of(tensor: Tensor) -> int:
    """Returns the bytes of a tensor's numbers."""
    # Not tensor.size: Paddle asks NumPy for that, which takes as long as a small layer.
    return int(math.prod(tensor.shape)) * int(tensor.element_size())


def _apart(tensor: Tensor, others: Iterable[Tensor]) -> Tensor:
    """Returns ``tensor``, or a copy if one of ``others`` begins within its memory, or it in one."""
    if tensor is None or not any(_overlap(tensor, other) for other in others if other is not None):
        return tensor
    return tensor.clone()


def _overlap(tensor: Tensor, other: Tensor) -> bool:
    low, high = sorted((tensor, other), key=lambda either: int(either.data_ptr()))
    return bool(high.data_ptr() < low.data_ptr() + bytes_of(low))
