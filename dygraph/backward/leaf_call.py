"""One call of a leaf layer, cut out of the graph around it, so that its weight gradients can wait.

A ``PyLayer`` takes the place of the call in the graph. Its backward computes only the gradients of
the call's inputs, and runs the user's hooks on the gradients of the outputs: Paddle would run such
hooks on a ``PyLayer``'s outputs, but drop their results. Start with :class:`Call` and
:func:`connect_call`.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fleetpipe.aliases import Context, Tensor
from fleetpipe.dygraph.backward.added_gradients import Sums, token
from fleetpipe.dygraph.backward.leaf import Leaf
from fleetpipe.dygraph.gradients import second_backward_error
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

#: ``hook(gradient)`` returns another gradient, or None.
Hook = Callable[[Tensor], Any]


#: For each output of a call, by its id: a weak reference to it, and the store of its hooks.
_routes: dict[int, tuple[weakref.ref[Tensor], _HooksOfOutput]] = {}

#: An output with at least so many bytes is not kept until W, at the cost of two more graph nodes.
_LARGE = 2**20


class OutputHooks:
    """The user's hooks on the gradients of the outputs of one call."""

    def __init__(self) -> None:
        #: The hooks by the number of the output, and then by the number of the hook.
        self._hooks: dict[int, dict[int, Hook]] = {}

    def watch(self, outputs: Iterable[Tensor]) -> None:
        """Makes hooks that are registered on ``outputs`` from now on be stored here."""
        for number, output in enumerate(outputs):
            route = _HooksOfOutput(self._hooks, number, output.inplace_version)
            # A freed output leaves ``_routes``.
            reference = weakref.KeyedRef(output, lambda freed: _routes.pop(freed.key), id(output))
            _routes[id(output)] = reference, route

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


class _HooksOfOutput:
    """Stores the hooks on one output of a call, as long as the output is not changed in place.

    Paddle stores and runs the hooks that are registered after such a change.
    """

    def __init__(self, hooks: dict[int, dict[int, Hook]], number: int, version: int) -> None:
        """Stores hooks in ``hooks[number]``, for output ``number`` while it has this version."""
        self._hooks_of_call, self._number, self._version = hooks, number, version
        self._next_hook = 0

    def put(self, tensor: Tensor, hook: Hook) -> int:
        """Stores a hook on ``tensor``, the output; returns its number for :meth:`remove`."""
        if self._is_another(tensor):
            return put_grad_hook(tensor, hook)
        self._hooks_of_call.setdefault(self._number, {})[self._next_hook] = hook
        self._next_hook += 1
        return self._next_hook - 1

    def remove(self, tensor: Tensor, number: int) -> bool:
        """Removes the hook with a number; returns whether there was one."""
        if self._is_another(tensor):
            return remove_grad_hook(tensor, number)
        return self._hooks_of_call.get(self._number, {}).pop(number, None) is not None

    def _is_another(self, tensor: Tensor) -> bool:
        """Whether an operation in place has changed ``tensor`` since it was the output."""
        return tensor.inplace_version != self._version and not is_made_by_pylayer(tensor)


def _register_grad_hook(tensor: Tensor, hook: Hook) -> int:
    """Registers a hook on a tensor's gradient, for Paddle; returns its number.

    A hook on an output of a call goes to the call's :class:`OutputHooks`, others to Paddle.
    """
    if tensor.stop_gradient:
        # In a captured model whose layers were frozen later; Paddle would crash.
        return 0
    hook = keyed_hook(tensor, hook)
    routed = _routes.get(id(tensor))
    return put_grad_hook(tensor, hook) if routed is None else routed[1].put(tensor, hook)


def _remove_grad_hook(tensor: Tensor, number: int) -> bool:
    """Removes a hook that :func:`_register_grad_hook` has registered; returns whether it did."""
    if tensor.stop_gradient:
        return True
    routed = _routes.get(id(tensor))
    return remove_grad_hook(tensor, number) if routed is None else routed[1].remove(tensor, number)


route_grad_hooks(_register_grad_hook, _remove_grad_hook)


class Call(ABC):
    """One call of a leaf layer whose weight gradients wait for W."""

    def __init__(self, leaf: Leaf, parameters: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Describes a call.

        Args:
            leaf: The layer.
            parameters: Its trainable parameters.
            outputs: The outputs of its forward; empty if :meth:`take_outputs` computes them.
        """
        self.leaf = leaf
        #: The layer's trainable parameters.
        self.parameters = list(parameters)
        #: The gradients of the outputs, from I until W; None for an unused output.
        self.output_grads: Sequence[Tensor] = ()
        self._outputs: Sequence[Tensor] = outputs
        #: The user's hooks on the gradients of the outputs.
        self.hooks = OutputHooks()

    def take_outputs(self) -> tuple[Tensor, ...]:
        """Returns the call's outputs, detached; called once, while autograd is off."""
        outputs, self._outputs = self._outputs, ()
        return tuple(output.detach() for output in outputs)

    @abstractmethod
    def input_grads(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Computes the gradients of the call's inputs, in action I of a split backward.

        Keeps what action W needs to compute the weight gradients.

        Args:
            grads: The gradients of the outputs; None for an unused output.
        """

    @abstractmethod
    def weight_grads(self) -> list[tuple[Tensor, Tensor]]:
        """Computes the weight gradients, in action W of a split backward, and frees what they need.

        Returns:
            The parameters that have a gradient, each with its gradient.
        """

    def add_weight_grads(self, sums: Sums) -> None:
        """Computes the weight gradients, and adds them to those of earlier micro-batches."""
        sums.add(self.weight_grads())


class Refusals:
    """Stores the error of a leaf call's backward, which Paddle would replace by its own."""

    def __init__(self) -> None:
        self.error: FleetPipeError | None = None
        #: Whether the backward of any stage runs.
        self.in_backward = False


class Tape:
    """The calls of leaf layers of one micro-batch in a stage, until their weight gradients."""

    def __init__(self, refusals: Refusals) -> None:
        #: The calls whose input gradients have been computed, and whose weight gradients have not.
        self.calls: list[Call] = []
        #: The layers with calls whose weight gradients autograd computes in I.
        self.uncut: set[Leaf] = set()
        #: Whether the stage's own backward runs.
        self.in_backward = False
        self.refusals = refusals


class _CallNode(paddle.autograd.PyLayer):
    """The node that replaces a call of at most one operation in the graph around the call."""

    @staticmethod
    def forward(ctx: Context, call: Call, tape: Tape, *_inputs: Tensor) -> Tensor:
        """Returns the outputs of the call."""
        ctx.call, ctx.tape = call, tape
        ctx.set_materialize_grads(False)
        return call.take_outputs()

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Tensor:
        """Returns the gradients of the call's inputs, in action I of a split backward."""
        return _input_grads_of(ctx.call, ctx.tape, ctx.call.hooks.apply(grads))


class _InputNode(paddle.autograd.PyLayer):
    """The last node in backward of those that replace a call of several operations."""

    @staticmethod
    def forward(ctx: Context, call: Call, tape: Tape, *_inputs: Tensor) -> Tensor:
        """Returns a token that connects the inputs to the next node."""
        ctx.call, ctx.tape = call, tape
        return token().detach()

    @staticmethod
    def backward(ctx: Context, _token: Tensor) -> Tensor:
        """Returns the gradients of the inputs, from those that :class:`_OutputNode` has stored."""
        return _input_grads_of(ctx.call, ctx.tape, ctx.call.output_grads)


class _OutputNode(paddle.autograd.PyLayer):
    """The first node in backward of those that replace a call of several operations."""

    @staticmethod
    def forward(ctx: Context, call: Call, _token: Tensor) -> Tensor:
        """Returns the outputs of the call."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        return call.take_outputs()

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Tensor:
        """Stores the gradients of the outputs for I."""
        ctx.call.output_grads = ctx.call.hooks.apply(grads)
        return token()


def _input_grads_of(call: Call, tape: Tape, grads: Sequence[Tensor]) -> Tensor:
    """Computes the gradients of a call's inputs, and leaves its weight gradients to action W.

    Returns them as a ``PyLayer`` does. ``grads`` are those of the outputs; None for an unused one.

    Raises:
        FleetPipeError: Another stage's backward has reached the call.
    """
    if not tape.in_backward:
        # Paddle leaves gradients off where a backward fails.
        switch_gradients_on()
        error = (
            second_backward_error()
            if tape.refusals.in_backward
            else ConfigError(
                f"a forward or the loss computes gradients through layer {call.leaf.name!r}, whose "
                "backward is split",
                cause="paddle.grad there is a backward of its own, and the layer has one, in I and "
                "W",
                fix="choose a schedule without W, such as 1F1B or FThenB",
            )
        )
        tape.refusals.error = error
        raise error
    gradients = call.input_grads(grads) or [token()]
    tape.calls.append(call)
    return tuple(gradients) if len(gradients) > 1 else gradients[0]


def connect_call(call: Call, tape: Tape, depth: int, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Puts ``depth`` nodes between a call's outputs and inputs into the graph around the call.

    Autograd runs operations in the order in which they become ready, and adds up gradients as they
    arrive. With as many nodes as the call has operations, gradients are added up in the same order
    as if the call were in the graph itself.

    Args:
        call: The call.
        tape: The tape of the micro-batch, to which backward adds the call.
        depth: The number of operations on the longest path from the outputs to the inputs.
        inputs: The tensors among the call's arguments whose gradients it computes.

    Returns:
        The outputs, connected to ``inputs``.
    """
    if depth < 2:
        apply: Callable[..., Tensor] = _CallNode.apply
        # A layer without differentiable inputs, such as Embedding, gets a token as its input.
        result = apply(call, tape, *(inputs or [token(stop_gradient=False)]))
    else:
        add_input_node: Callable[..., Tensor] = _InputNode.apply
        link = add_input_node(call, tape, *inputs)
        for _ in range(depth - 2):
            link = paddle.scale(link)
        add_output_node: Callable[..., Tensor] = _OutputNode.apply
        result = add_output_node(call, link)
    outputs = result if isinstance(result, (tuple, list)) else [result]
    call.hooks.watch(outputs)
    return outputs


class GraphCall(Call):
    """A call that keeps a small graph of its own, from its inputs to its outputs."""

    def __init__(
        self,
        leaf: Leaf,
        parameters: Sequence[Tensor],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> None:
        """Describes a call with a graph of its own.

        Args:
            leaf: The layer.
            parameters: Its trainable parameters.
            inputs: The leaves of that graph, each of which stands for an input.
            outputs: The outputs that have a gradient.
        """
        super().__init__(leaf, parameters, outputs)
        roots = list(outputs)
        self._replaces_output = len(roots) == 1 and tensor_bytes(roots[0]) >= _LARGE
        if self._replaces_output:
            # Otherwise the output would be kept until W, even if no operation needs it.
            replace_output: Callable[..., Tensor] = _LargeOutputNode.apply
            roots = [replace_output(self, roots[0])]
        #: The inputs of the call's graph, and the tensors from which its backward starts: the
        #: outputs, or a token in the place of a large one. None after W.
        self._graph: tuple[Sequence[Tensor], list[Tensor]] | None = (inputs, roots)
        #: The gradients of the parameters, if Paddle had to compute them in I.
        self._weight_grads: Sequence[Tensor] | None = None

    def input_grads(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Computes the gradients of all inputs, and keeps the graph for the weight gradients.

        Args:
            grads: The gradients of the outputs; None for an unused output.
        """
        if self._graph is None:
            raise RuntimeError("backward ran twice through a call of a leaf layer")
        self.output_grads, (inputs, _) = grads, self._graph
        if any(grad is not None and not grad.size for grad in grads):
            # Paddle cannot compute only one gradient of a product without rows.
            gradients = self._gradients([*inputs, *self.parameters], retain_graph=True)
            self._weight_grads = gradients[len(inputs) :]
        else:
            gradients = self._gradients(inputs, retain_graph=True)
        # None would crash Paddle if an operation has made the input.
        return [
            paddle.zeros_like(tensor) if grad is None else grad
            for tensor, grad in zip(inputs, gradients)
        ]

    def weight_grads(self) -> list[tuple[Tensor, Tensor]]:
        """Computes the weight gradients from the call's graph, and frees the graph."""
        gradients = self._weight_grads
        if gradients is None:
            gradients = self._gradients(self.parameters, retain_graph=False)
        self._graph, self._weight_grads, self.output_grads = None, None, ()
        return [(p, grad) for p, grad in zip(self.parameters, gradients) if grad is not None]

    def _gradients(self, wanted: Sequence[Tensor], retain_graph: bool) -> list[Tensor]:
        """Computes the gradients of tensors of the call's graph from the outputs' gradients.

        Args:
            wanted: Inputs or parameters.
            retain_graph: Whether to keep the graph for another call.

        Returns:
            A gradient for each of ``wanted``; None for a tensor that no output depends on.
        """
        _, roots = self._graph or ((), [])
        used = [(root, grad) for root, grad in zip(roots, self.output_grads) if grad is not None]
        if not used or not wanted:
            return [None] * len(wanted)
        starts, grads = map(list, zip(*used))
        return list(
            paddle.grad(
                starts,
                list(wanted),
                None if self._replaces_output else grads,
                retain_graph=retain_graph,
                allow_unused=True,
            )
        )


class _LargeOutputNode(paddle.autograd.PyLayer):
    """Replaces a large output at the end of a call's graph by a token, which starts backward."""

    @staticmethod
    def forward(ctx: Context, call: Call, _output: Tensor) -> Tensor:
        """Returns a token in the place of the output."""
        ctx.call = weakref.ref(call)
        return token().detach()

    @staticmethod
    def backward(ctx: Context, _token: Tensor) -> Tensor:
        """Returns the gradient of the output."""
        return ctx.call().output_grads[0]
