"""Adds delayed gradients to those of parameters, and finds out in which order gradients are added.

:class:`Sums` adds gradients: through autograd the first one in a batch and those with hooks, others
in place. :class:`GradientArrivals` records which gradients a split backward delays until W.
A :class:`Crossing` shows where a stage may add gradients in another order than one graph of the
whole model.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

from fleetpipe.aliases import Context, GradNode, Layer, Tensor
from fleetpipe.dygraph.backward.leaf import nodes_of, operands
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.eager_operations import add_in_place
from fleetpipe.paddle_api.tensor import CAN_RUN_REDUCE_HOOKS, number_of_hook, run_reduce_hooks

#: The number of hooks on a parameter's gradient that fleetpipe has added, by the parameter's id.
_own_hooks: dict[int, int] = {}

#: ``layers_of(stage)`` returns the layers of a stage by their numbers in the whole list.
LayersOf = Callable[[int], Mapping[int, Layer]]

#: The fields of a :class:`Meeting`.
Plain = tuple[int, tuple[int, ...], tuple[int, ...]]


class Sums:
    """Adds up the gradients of parameters over one batch."""

    def __init__(self) -> None:
        #: The ids of the parameters that have a gradient in this batch.
        self.begun: set[int] = set()

    def end(self) -> None:
        """Ends the batch: the first gradients of the next batch go through autograd again.

        They must replace the zeros that ``clear_grad`` may leave.
        """
        self.begun.clear()

    def add(self, grads: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Adds gradients to their parameters and runs hooks; autograd must be off.

        Args:
            grads: Pairs of parameter and gradient, each parameter once.
        """
        rest = []
        for parameter, grad in grads:
            total = self.total(parameter)
            if total is not None and grad.is_dense() and grad.dtype == total.dtype:
                add_in_place(total, grad)
                run_reduce_hooks(parameter)
            else:
                rest.append((parameter, grad))
        if rest:
            _add_by_autograd(rest)
            self.begun.update(id(parameter) for parameter, _ in rest)

    def total(self, parameter: Tensor) -> Tensor | None:
        """Returns the gradient of ``parameter`` if gradients may be added to it in place."""
        if id(parameter) not in self.begun or not CAN_RUN_REDUCE_HOOKS or is_watched(parameter):
            return None
        # A callback may have removed it in the middle of the batch.
        total = parameter.grad
        return total if total is not None and total.is_dense() else None


@cache
def token(stop_gradient: bool = True) -> Tensor:
    """Returns a tensor of one number that replaces a value in the graph.

    It is made when a backward needs it, not on import: the first operation of a process allocates
    some hundreds of megabytes on a GPU, which many commands do not need.
    """
    made = paddle.zeros([1], "float32")
    made.stop_gradient = stop_gradient
    return made


class _Sum(paddle.autograd.PyLayer):
    """Adds gradients to parameters by autograd, without the copies that ``backward()`` makes."""

    @staticmethod
    def forward(ctx: Context, take: Callable[[], list[Tensor]], *_parameters: Tensor) -> Tensor:
        # A function, since Paddle takes each tensor in a list for an input.
        ctx.take = take
        return token().detach()

    @staticmethod
    def backward(ctx: Context, _token: Tensor) -> Tensor:
        grads = ctx.take()
        return tuple(grads) if len(grads) > 1 else grads[0]


def _add_by_autograd(grads: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Adds gradients to their parameters by a backward, which runs the parameters' hooks."""
    parameters, gradients = map(list, zip(*grads))
    add: Callable[..., Tensor] = _Sum.apply
    with paddle.enable_grad():
        total = add([gradients].pop, *parameters)
    total.backward()


def count_own_hook(parameter: Tensor) -> None:
    """Counts a gradient hook that fleetpipe has added and removed, which Paddle still counts."""
    if id(parameter) not in _own_hooks:
        weakref.finalize(parameter, _own_hooks.pop, id(parameter), None)
    _own_hooks[id(parameter)] = _own_hooks.get(id(parameter), 0) + 1


def is_watched(parameter: Tensor) -> bool:
    """Whether code other than fleetpipe's has ever added a hook on the gradient of ``parameter``.

    Paddle numbers the hooks of a parameter in order, and fleetpipe counts its own hooks.
    """
    count_own_hook(parameter)
    return number_of_hook(parameter) != _own_hooks[id(parameter)] - 1


class GradientArrivals:
    """Records by hooks, in the first batch, in which kind of action parameters get gradients."""

    def __init__(self) -> None:
        #: The kinds of action, I and W, in which each trainable parameter got gradients, by name.
        self.kinds: dict[str, set[str]] = {}
        self._parameters: dict[str, Tensor] = {}
        self._handles: list[tuple[Tensor, Any]] = []
        self._stages: set[int] = set()
        self._kind = ""
        self._open = True

    def stop(self) -> None:
        """Removes the hooks."""
        self._open = False
        for parameter, handle in self._handles:
            handle.remove()
            count_own_hook(parameter)
        self._handles.clear()

    def during(self, stage: int, kind: str, layers_of: LayersOf) -> AbstractContextManager[None]:
        """While it is open, gradients that arrive are recorded for an action of a stage."""
        return self._noting(stage, kind, layers_of) if self._open else nullcontext()

    @contextmanager
    def _noting(self, stage: int, kind: str, layers_of: LayersOf) -> Iterator[None]:
        """While it is open, gradients of a stage's parameters are recorded under ``kind``."""
        if stage not in self._stages:
            self._stages.add(stage)
            for index, layer in layers_of(stage).items():
                if not isinstance(layer, paddle.nn.Layer):
                    continue
                for path, parameter in layer.named_parameters(prefix=str(index)):
                    self._watch(path, parameter)
        self._kind = kind
        try:
            yield
        finally:
            self._kind = ""

    def halves(self) -> set[int]:
        """Returns the ids of the parameters that got part of their gradient in I and part in W."""
        return {id(self._parameters[name]) for name, kinds in self.kinds.items() if len(kinds) > 1}

    def _watch(self, name: str, parameter: Tensor) -> None:
        """Records in which kinds of action, I or W, a parameter gets a gradient."""
        if parameter.stop_gradient:
            return
        self._parameters[name] = parameter
        kinds = self.kinds.setdefault(name, set())

        def note(_grad: Tensor) -> None:
            if self._kind:
                kinds.add(self._kind)

        self._handles.append((parameter, parameter.register_hook(note)))


class Meeting(NamedTuple):
    """A tensor of a stage at which gradients meet and are added up.

    Attributes:
        edges: The number of gradients that operations of the stage send to the tensor.
        outputs: The numbers of the stage's outputs that are this tensor.
        ways: The numbers of the stage's outputs whose backward reaches this tensor.
    """

    edges: int
    outputs: tuple[int, ...]
    ways: tuple[int, ...]


class Crossing(NamedTuple):
    """The tensors of a stage at which the order of sums may depend on other stages.

    Attributes:
        received: The meetings at received tensors that need a gradient.
        joined: The meetings at tensors and parameters that the backward of several outputs reaches
            and at which three or more gradients may meet; equal meetings appear once.
    """

    received: tuple[Meeting, ...]
    joined: tuple[Meeting, ...]

    def plain(self) -> list[list[Plain]]:
        """Returns the crossing as lists and tuples, to send to other ranks."""
        return [[(part.edges, part.outputs, part.ways) for part in parts] for parts in self]

    @classmethod
    def from_plain(cls, parts: list[list[Plain]]) -> Crossing:
        """Builds a crossing from the result of :meth:`plain`."""
        return cls(*(tuple(Meeting(*part) for part in some) for some in parts))


def crossing_of(received: Sequence[Tensor], outputs: Sequence[Tensor]) -> Crossing:
    """Walks the graph of a stage whose backward has run, and returns its crossing.

    Args:
        received: The received tensors that need a gradient.
        outputs: The tensors that the stage sent, or its loss.
    """
    roots = [tensor.grad_fn for tensor in outputs]
    # Paddle never frees a node that Python refers to; after backward these nodes hold no tensors.
    reach = [nodes_of([root], set()) for root in roots]
    below = [(node, other) for node in set().union(*reach) for other in operands(node)]
    edges = Counter(other for _, other in below)
    # The layers of a stage take copies of received tensors: their gradients meet at the copy.
    copies = {other: node for node, other in below if node.name() == "AssignGradNode"}

    def meeting(node: GradNode, itself: Sequence[int]) -> Meeting:
        ways = tuple(index for index, nodes in enumerate(reach) if node in nodes)
        return Meeting(edges[node], tuple(itself), ways)

    meetings: set[Meeting] = set()
    for node in edges.keys() | set(roots):
        # Several outputs of one operation are different tensors.
        parts: dict[int, list[int]] = {}
        for index, tensor in enumerate(outputs):
            if tensor.grad_fn == node:
                parts.setdefault(id(tensor), []).append(index)
        meetings.update(meeting(node, itself) for itself in parts.values() or [[]])
    taken = [copies.get(leaf.grad_fn, leaf.grad_fn) for leaf in received]
    arrivals = [
        meeting(node, [i for i, root in enumerate(roots) if root == node]) for node in taken
    ]
    joined = (part for part in meetings if len(part.ways) > 1 and (part.outputs or part.edges > 2))
    return Crossing(tuple(arrivals), tuple(sorted(joined)))


def reordered(crossings: Mapping[int, Crossing]) -> list[int]:
    """Returns the stages that may add gradients in another order than one graph of the model.

    Args:
        crossings: The crossings of all stages of a chain, by stage.
    """
    stages = []
    # The number of gradients that one graph of the model adds up at each output of the stage.
    sums: list[int] = []
    for stage in sorted(crossings, reverse=True):
        crossing, count = crossings[stage], sums or [1]
        outputs = 1 + max((i for parts in crossing for part in parts for i in part.ways), default=0)
        if outputs > len(count):
            # A captured model also has edges to later stages, whose gradients may all be sums.
            count = [2] * outputs
        if any(
            part.edges + sum(count[i] for i in part.outputs) > 2
            and sum(count[i] > 0 for i in part.ways) > 1
            for part in crossing.joined
        ):
            stages.append(stage)
        sums = [part.edges + sum(count[i] for i in part.outputs) for part in crossing.received]
    return stages[::-1]
