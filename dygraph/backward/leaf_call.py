"""One call of a leaf layer, cut out of the graph around it, so that its weight gradient can wait.

The output of the layer passes through a ``PyLayer``, the border. In backward, the border computes
only the gradients of the call's inputs, and runs the hooks on the output: Paddle would run hooks on
a ``PyLayer``'s outputs, but drop their results. Start with :class:`Call` and :func:`put_border`.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from fleetpipe.aliases import Context, Tensor
from fleetpipe.dygraph.backward.added_gradients import Sums, token
from fleetpipe.dygraph.backward.leaf import Leaf
from fleetpipe.dygraph.gradients import graph_of_another_backward
from fleetpipe.dygraph.random_keys import keyed_hook
from fleetpipe.errors import ConfigError, FleetPipeError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.tensor import (
    is_made_by_pylayer,
    put_grad_hook,
    remove_grad_hook,
    route_grad_hooks,
    switch_gradients_on,
    tensor_bytes,
)

Hook = Callable[[Tensor], Any]


#: Where the hooks of a tensor are stored, by the tensor's id, with a weak reference to the tensor.
_routes: dict[int, tuple[weakref.ref[Tensor], _Output]] = {}

#: Larger outputs are not kept until W, which takes the time of two more nodes; in bytes.
_LARGE = 2**20


class OutputHooks:
    """The hooks on the outputs of one call."""

    def __init__(self) -> None:
        #: The hooks, by the number of the output and the number of the hook.
        self._hooks: dict[int, dict[int, Hook]] = {}

    def watch(self, outputs: Iterable[Tensor]) -> None:
        """Stores hooks that are registered on ``outputs`` from now on."""
        for number, output in enumerate(outputs):
            route = _Output(self._hooks, number, output.inplace_version)
            _routes[id(output)] = weakref.KeyedRef(output, _forget, id(output)), route

    def apply(self, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns the gradients of all outputs after the hooks have changed them.

        Args:
            grads: A gradient for each output; None for an unused output.
        """
        if not self._hooks:
            return grads
        changed = list(grads)
        for number, hooks in self._hooks.items():
            for hook in hooks.values():
                if changed[number] is not None:
                    result = hook(changed[number])
                    changed[number] = changed[number] if result is None else result
        return changed


class _Output:
    """Stores the hooks of one output of a call."""

    def __init__(self, hooks: dict[int, dict[int, Hook]], number: int, version: int) -> None:
        self._all, self._number, self._version = hooks, number, version
        self._put = 0

    def put(self, tensor: Tensor, hook: Hook) -> int:
        if self._is_another(tensor):
            return put_grad_hook(tensor, hook)
        self._all.setdefault(self._number, {})[self._put] = hook
        self._put += 1
        return self._put - 1

    def remove(self, tensor: Tensor, number: int) -> bool:
        if self._is_another(tensor):
            return remove_grad_hook(tensor, number)
        return self._all.get(self._number, {}).pop(number, None) is not None

    def _is_another(self, tensor: Tensor) -> bool:
        """Whether an operation in place has changed the tensor, whose hooks Paddle then runs."""
        return tensor.inplace_version != self._version and not is_made_by_pylayer(tensor)


def _forget(reference: weakref.KeyedRef[int, Tensor]) -> None:
    del _routes[reference.key]


def _register_grad_hook(tensor: Tensor, hook: Hook) -> int:
    """Replaces ``Tensor.register_hook``'s function: stores hooks on outputs of calls here."""
    if tensor.stop_gradient:
        # In a captured model whose layers were frozen later; Paddle would crash.
        return 0
    hook = keyed_hook(tensor, hook)
    routed = _routes.get(id(tensor))
    return put_grad_hook(tensor, hook) if routed is None else routed[1].put(tensor, hook)


def _remove_grad_hook(tensor: Tensor, number: int) -> bool:
    if tensor.stop_gradient:
        return True
    routed = _routes.get(id(tensor))
    return remove_grad_hook(tensor, number) if routed is None else routed[1].remove(tensor, number)


route_grad_hooks(_register_grad_hook, _remove_grad_hook)


class Call(ABC):
    """One call of a leaf layer."""

    def __init__(self, leaf: Leaf, parameters: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Creates a call whose forward has run."""
        self.leaf = leaf
        #: The layer's trainable parameters.
        self.parameters = list(parameters)
        #: The gradients of the outputs, from the backward of the border until W; None for an unused
        #: output.
        self.arrived: Sequence[Tensor] = ()
        self._leaving: Sequence[Tensor] = outputs
        #: The user's hooks on the gradients of the outputs.
        self.hooks = OutputHooks()

    def leave(self) -> tuple[Tensor, ...]:
        """Returns the call's outputs, detached; called once, while autograd is off."""
        leaving, self._leaving = self._leaving, ()
        return tuple(output.detach() for output in leaving)

    @abstractmethod
    def input_grads(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Computes the gradients of all inputs, and keeps the values for the weight gradients.

        Args:
            grads: The gradients of the outputs; None for an unused output.
        """

    @abstractmethod
    def weight_grads(self) -> list[tuple[Tensor, Tensor]]:
        """Computes the weight gradients, and frees the values that they need.

        Returns:
            The parameters that have a gradient, each with its gradient.
        """

    def add_weight_grads(self, sums: Sums) -> None:
        """Computes the weight gradients and adds them to ``sums``; frees the values they need."""
        sums.add(self.weight_grads())


class Refusals:
    """Stores the error of a border's backward, because Paddle replaces such errors."""

    def __init__(self) -> None:
        self.error: FleetPipeError | None = None
        #: Whether the backward of any stage runs.
        self.in_backward = False


class Tape:
    """The calls of one micro-batch in a stage, from its forward to W."""

    def __init__(self, refusals: Refusals) -> None:
        #: The calls whose input gradients have been computed.
        self.calls: list[Call] = []
        #: The layers of which autograd computes the weight gradients of some calls.
        self.uncut: set[Leaf] = set()
        #: Whether the stage's own backward runs.
        self.in_backward = False
        self.refusals = refusals


class _Border(paddle.autograd.PyLayer):
    """The border of a call of at most one operation: one node in the graph around it."""

    @staticmethod
    def forward(ctx: Context, call: Call, tape: Tape, *_inputs: Tensor) -> Tensor:
        ctx.call, ctx.tape = call, tape
        ctx.set_materialize_grads(False)
        return call.leave()

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Tensor:
        return _input_grads_of(ctx.call, ctx.tape, ctx.call.hooks.apply(grads))


class _Entry(paddle.autograd.PyLayer):
    """The border of a call of several operations, at its inputs."""

    @staticmethod
    def forward(ctx: Context, call: Call, tape: Tape, *_inputs: Tensor) -> Tensor:
        ctx.call, ctx.tape = call, tape
        return token().detach()

    @staticmethod
    def backward(ctx: Context, _token: Tensor) -> Tensor:
        return _input_grads_of(ctx.call, ctx.tape, ctx.call.arrived)


class _Exit(paddle.autograd.PyLayer):
    """The border of a call of several operations, at its outputs."""

    @staticmethod
    def forward(ctx: Context, call: Call, _token: Tensor) -> Tensor:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return call.leave()

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Tensor:
        ctx.call.arrived = ctx.call.hooks.apply(grads)
        return token()


def _input_grads_of(call: Call, tape: Tape, grads: Sequence[Tensor]) -> Tensor:
    """Returns the gradients of a call's inputs, and adds the call to the tape for W."""
    if not tape.in_backward:
        # Paddle leaves gradients off where a backward fails.
        switch_gradients_on()
        error = (
            graph_of_another_backward()
            if tape.refusals.in_backward
            else _computed_within(call.leaf)
        )
        tape.refusals.error = error
        raise error
    gradients = call.input_grads(grads) or [token()]
    tape.calls.append(call)
    return tuple(gradients) if len(gradients) > 1 else gradients[0]


def _computed_within(leaf: Leaf) -> ConfigError:
    """Returns the error of a ``paddle.grad`` in a forward that reaches a leaf layer."""
    return ConfigError(
        f"a forward or the loss computes gradients through layer {leaf.name!r}, whose "
        "backward is split",
        cause="paddle.grad there is a backward of its own, and the layer has one, in I and W",
        fix="choose a schedule without W, such as 1F1B or FThenB",
    )


def put_border(call: Call, tape: Tape, depth: int, entries: Sequence[Tensor]) -> Sequence[Tensor]:
    """Connects a call to the graph around it, by ``depth`` nodes between its outputs and inputs.

    Autograd runs operations in the order in which they become ready, and adds up gradients as they
    arrive. With as many nodes as the call has operations, gradients are added up in the same order
    as without a border.

    Args:
        call: The call.
        tape: The tape to which backward adds the call.
        depth: The number of operations on the longest path from the outputs to the inputs.
        entries: The tensors among the call's arguments whose gradients it computes.

    Returns:
        The outputs, connected to ``entries``.
    """
    if depth < 2:
        apply: Callable[..., Tensor] = _Border.apply
        # A layer without differentiable inputs, such as Embedding, gets a token as its input.
        left = apply(call, tape, *(entries or [token(stop_gradient=False)]))
    else:
        enter: Callable[..., Tensor] = _Entry.apply
        crossing = enter(call, tape, *entries)
        for _ in range(depth - 2):
            crossing = paddle.scale(crossing)
        leave: Callable[..., Tensor] = _Exit.apply
        left = leave(call, crossing)
    outputs = left if isinstance(left, (tuple, list)) else [left]
    call.hooks.watch(outputs)
    return outputs


class CallGraph(NamedTuple):
    """The graph of one call of a layer.

    Attributes:
        inputs: The stand-ins for arguments on which the outputs depend.
        roots: The tensors from which backward starts: the outputs that have a gradient, or a token
            that replaces a single large output.
    """

    inputs: list[Tensor]
    roots: list[Tensor]


class GraphCall(Call):
    """A call that keeps a small graph of its own, from its inputs to its outputs."""

    def __init__(
        self,
        leaf: Leaf,
        parameters: Sequence[Tensor],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> None:
        super().__init__(leaf, parameters, outputs)
        roots = list(outputs)
        self._stands = len(roots) == 1 and tensor_bytes(roots[0]) >= _LARGE
        if self._stands:
            # Otherwise the output would be kept until W, even if no operation needs it.
            stand: Callable[..., Tensor] = _Root.apply
            roots = [stand(self, roots[0])]
        self._graph: CallGraph | None = CallGraph(list(inputs), roots)
        #: The gradients of the parameters, if they had to be computed in I.
        self._computed: Sequence[Tensor] | None = None

    def input_grads(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Computes the gradients of all inputs, and keeps the graph for the weight gradients.

        Args:
            grads: The gradients of the outputs; None for an unused output.
        """
        if self._graph is None:
            raise RuntimeError("backward ran twice through a call of a leaf layer")
        self.arrived, inputs = grads, self._graph.inputs
        if any(grad is not None and not grad.size for grad in grads):
            # Paddle cannot compute only one gradient of a product without rows.
            gradients = self._gradients([*inputs, *self.parameters], retain_graph=True)
            self._computed = gradients[len(inputs) :]
        else:
            gradients = self._gradients(inputs, retain_graph=True)
        # None would crash Paddle if an operation has made the input.
        return [
            paddle.zeros_like(tensor) if grad is None else grad
            for tensor, grad in zip(inputs, gradients)
        ]

    def weight_grads(self) -> list[tuple[Tensor, Tensor]]:
        """Computes the weight gradients, and frees the graph."""
        gradients = self._computed
        if gradients is None:
            gradients = self._gradients(self.parameters, retain_graph=False)
        self._graph, self._computed, self.arrived = None, None, ()
        return [(p, grad) for p, grad in zip(self.parameters, gradients) if grad is not None]

    def _gradients(self, wanted: Sequence[Tensor], retain_graph: bool) -> list[Tensor]:
        """Computes the gradients of ``wanted`` from the outputs' gradients; None without one."""
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
    """Replaces a large output at the end of a call's graph by a token, which starts backward."""

    @staticmethod
    def forward(ctx: Context, call: Call, _output: Tensor) -> Tensor:
        ctx.call = weakref.ref(call)
        return token().detach()

    @staticmethod
    def backward(ctx: Context, _token: Tensor) -> Tensor:
        return ctx.call().arrived[0]
