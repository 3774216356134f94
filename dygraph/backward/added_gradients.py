"""Adds delayed gradients to those of parameters, and finds out in which order gradients are added.

:class:`Sums` adds gradients to parameters: through autograd the first one in a batch and those with
hooks, others in place. :class:`GradientArrivals` records which gradients a split backward computes
in I, and which in W. A :class:`Crossing` shows where a stage may add gradients in another order
than one graph of the whole model. The order of a sum matters to its bits if it has three or more
terms: a sum of two has the same bits in both orders.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

from fleetpipe.aliases import Context, GradNode, Layer, Tensor
from fleetpipe.dygraph.backward.leaf import find_nodes, next_nodes
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.eager_operations import add_in_place
from fleetpipe.paddle_api.tensor import CAN_RUN_REDUCE_HOOKS, next_hook_number, run_reduce_hooks

#: The number of hooks on a parameter's gradient that fleetpipe has added, by the parameter's id.
_own_hooks: dict[int, int] = {}

#: ``layers_of(stage)`` returns the layers of a stage, by their numbers in the whole list.
LayersOf = Callable[[int], Mapping[int, Layer]]

#: The fields of a :class:`Meeting`, in order.
MeetingFields = tuple[int, tuple[int, ...], tuple[int, ...]]


class Sums:
    """Adds the gradients that micro-batches give parameters to ``parameter.grad``, by batch."""

    def __init__(self) -> None:
        #: The ids of the parameters that have a gradient in this batch.
        self.begun: set[int] = set()

    def end(self) -> None:
        """Ends the batch: the first gradients of the next batch go through autograd again.

        Adding these in place would be wrong: ``clear_grad`` may have removed the tensor, or left
        zeros in it.
        """
        self.begun.clear()

    def add(self, grads: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Adds gradients to their parameters and runs hooks; autograd must be off.

        Args:
            grads: Pairs of parameter and gradient, each parameter once.
        """
        # The pairs whose gradient cannot be added in place.
        rest = []
        for parameter, grad in grads:
            total = self.total(parameter)
            if total is not None and grad.is_dense() and grad.dtype == total.dtype:
                add_in_place(total, grad)
                run_reduce_hooks(parameter)
            else:
                rest.append((parameter, grad))
        if rest:
            # By a backward, which runs the parameters' hooks.
            parameters, gradients = map(list, zip(*rest))
            add: Callable[..., Tensor] = _AddByAutograd.apply
            with paddle.enable_grad():
                # ``pop`` is a function that returns the gradients.
                result = add([gradients].pop, *parameters)
            result.backward()
            self.begun.update(map(id, parameters))

    def total(self, parameter: Tensor) -> Tensor | None:
        """Returns ``parameter.grad`` if more may be added to it in place; else None."""
        if id(parameter) not in self.begun or not CAN_RUN_REDUCE_HOOKS or is_watched(parameter):
            return None
        # A callback may have removed the gradient in the middle of the batch.
        total = parameter.grad
        return total if total is not None and total.is_dense() else None


@cache
def token(stop_gradient: bool = True) -> Tensor:
    """Returns a tensor of one number, which connects nodes of a graph where no value is needed.

    There is one for each value of ``stop_gradient``. It is made when a backward needs it, not on
    import: the first operation of a process allocates some hundreds of megabytes on a GPU, which
    many commands do not need.
    """
    zero = paddle.zeros([1], "float32")
    zero.stop_gradient = stop_gradient
    return zero


class _AddByAutograd(paddle.autograd.PyLayer):
    """Adds gradients to parameters by autograd, without the copies that ``backward()`` makes.

    Its backward passes the gradients, which ``take()`` returns, on to the parameters.
    """

    @staticmethod
    def forward(ctx: Context, take: Callable[[], list[Tensor]], *_parameters: Tensor) -> Tensor:
        """Returns a token that needs a gradient, so that backward reaches the parameters.

        Args:
            ctx: Paddle's context of the call, which hands ``take`` to the backward.
            take: Returns the gradients to add, one for each parameter.
            _parameters: The parameters.
        """
        # A function and no list, since Paddle takes each tensor in a list for an input.
        ctx.take = take
        return token().detach()

    @staticmethod
    def backward(ctx: Context, _token: Tensor) -> Tensor:
        """Returns the gradients to add, one for each parameter; ``_token`` has no meaning."""
        grads = ctx.take()
        return tuple(grads) if len(grads) > 1 else grads[0]


def count_own_hook(parameter: Tensor) -> None:
    """Counts a gradient hook that fleetpipe adds, so that :func:`is_watched` ignores it."""
    if id(parameter) not in _own_hooks:
        weakref.finalize(parameter, _own_hooks.pop, id(parameter), None)
    _own_hooks[id(parameter)] = _own_hooks.get(id(parameter), 0) + 1


def is_watched(parameter: Tensor) -> bool:
    """Whether code other than fleetpipe's has ever added a hook on the gradient of ``parameter``.

    Paddle numbers all hooks of a parameter in order, removed ones too, and fleetpipe counts its
    own. This function adds a hook of its own, to see its number.
    """
    count_own_hook(parameter)
    return next_hook_number(parameter) != _own_hooks[id(parameter)] - 1


class GradientArrivals:
    """Records by hooks, in the first batch, whether parameters get gradients in I or in W.

    Actions are named by their kind: "I" computes input gradients, "W" weight gradients.
    """

    def __init__(self) -> None:
        #: The kinds of action, I and W, in which each trainable parameter got gradients, by name.
        self.kinds: dict[str, set[str]] = {}
        #: The parameters that have a hook, by name.
        self._parameters: dict[str, Tensor] = {}
        #: The parameters that have a hook, each with the handle that removes it.
        self._handles: list[tuple[Tensor, Any]] = []
        #: The stages whose parameters have hooks.
        self._stages: set[int] = set()
        #: The kind of the action that runs; "" between actions.
        self._kind = ""
        #: Whether the hooks are to record: until :meth:`stop`.
        self.is_active = True

    def stop(self) -> None:
        """Removes the hooks, at the end of the first batch."""
        self.is_active = False
        for parameter, handle in self._handles:
            handle.remove()
            # Only now, so that until here gradients went through autograd, and so to the hook.
            count_own_hook(parameter)
        self._handles.clear()

    @contextmanager
    def record(self, stage: int, kind: str, layers_of: LayersOf) -> Iterator[None]:
        """A context in which an action of a stage runs; records which parameters get gradients.

        The first action of a stage adds the hooks that record them.

        Args:
            stage: The stage of the action.
            kind: The kind of the action: "I" or "W".
            layers_of: Returns the layers of a stage, by their numbers in the whole list.
        """
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

    def parameters_in_both(self) -> set[int]:
        """Returns the ids of the parameters that got part of their gradient in I and part in W."""
        return {id(self._parameters[name]) for name, kinds in self.kinds.items() if len(kinds) > 1}

    def _watch(self, name: str, parameter: Tensor) -> None:
        """Adds a hook that records in which kinds of action a parameter gets gradients.

        Args:
            name: The path of the parameter, which begins with the number of its layer.
            parameter: The parameter; one that is frozen gets no hook.
        """
        if parameter.stop_gradient:
            return
        self._parameters[name] = parameter
        kinds = self.kinds.setdefault(name, set())

        def note_kind(_grad: Tensor) -> None:
            """Notes whether an action I or W runs as the parameter gets a gradient."""
            if self._kind:
                kinds.add(self._kind)

        self._handles.append((parameter, parameter.register_hook(note_kind)))


class Meeting(NamedTuple):
    """A tensor of a stage at which several gradients may arrive, to be added up.

    In backward, operations of the stage that use the tensor send gradients to it. If the tensor is
    an output of the stage, a later stage sends one too. Outputs are numbered in the order in which
    the stage sends them.

    Attributes:
        edges: The number of gradients that operations of the stage send to the tensor.
        outputs: The numbers of the stage's outputs that are the tensor itself.
        reached_by: The numbers of the stage's outputs whose backward reaches the tensor.
    """

    edges: int
    outputs: tuple[int, ...]
    reached_by: tuple[int, ...]


class Crossing(NamedTuple):
    """The tensors of a stage at which other stages may change the order of the gradients' sum.

    Attributes:
        received: A meeting for each received tensor that needs a gradient.
        joined: A meeting for each tensor or parameter that the backward of several outputs reaches
            and at which three or more gradients may meet; equal meetings appear once.
    """

    received: tuple[Meeting, ...]
    joined: tuple[Meeting, ...]

    def plain(self) -> list[list[MeetingFields]]:
        """Returns the fields as lists and tuples, to send to other ranks."""
        return [[(m.edges, m.outputs, m.reached_by) for m in meetings] for meetings in self]

    @classmethod
    def from_plain(cls, plain: list[list[MeetingFields]]) -> Crossing:
        """Builds a crossing from the result of :meth:`plain`."""
        return cls(*(tuple(Meeting(*fields) for fields in meetings) for meetings in plain))


def crossing_of(received: Sequence[Tensor], outputs: Sequence[Tensor]) -> Crossing:
    """Returns where other stages may change the order of a stage's sums, from its backward graph.

    Args:
        received: The tensors that the stage received and that need a gradient.
        outputs: The tensors that the stage sent; of the last stage, its loss.

    Returns:
        A meeting for each received tensor, in the order of ``received``; and one for each tensor at
        which three or more gradients may meet on the way back from several outputs. An output
        counts for more than one gradient, since later stages may send the sum of several.
    """
    roots = [tensor.grad_fn for tensor in outputs]
    # Paddle never frees a node that Python refers to; after backward these nodes hold no tensors.
    # The nodes that the backward of each output reaches.
    reach = [find_nodes([root], set()) for root in roots]
    steps = [(node, target) for node in set().union(*reach) for target in next_nodes(node)]
    # The number of gradients that operations send to each node, which stands for a tensor.
    edges = Counter(target for _, target in steps)
    # The layers of a stage take copies of received tensors: their gradients meet at the copy.
    copies = {target: node for node, target in steps if node.name() == "AssignGradNode"}

    def meeting(node: GradNode, outputs_at_node: Sequence[int]) -> Meeting:
        """Returns the meeting at the tensor that a node of the backward graph stands for.

        Args:
            node: The node; gradients of the tensor arrive at it.
            outputs_at_node: The numbers of the stage's outputs that are this very tensor; often
                none.
        """
        reached_by = tuple(index for index, nodes in enumerate(reach) if node in nodes)
        return Meeting(edges[node], tuple(outputs_at_node), reached_by)

    meetings: set[Meeting] = set()
    for node in edges.keys() | set(roots):
        # One operation may compute several outputs of the stage: a meeting for each tensor.
        numbers_by_tensor: dict[int, list[int]] = {}
        for index, tensor in enumerate(outputs):
            if tensor.grad_fn == node:
                numbers_by_tensor.setdefault(id(tensor), []).append(index)
        meetings.update(meeting(node, numbers) for numbers in numbers_by_tensor.values() or [[]])
    received_nodes = [copies.get(leaf.grad_fn, leaf.grad_fn) for leaf in received]
    arrivals = [
        meeting(node, [i for i, root in enumerate(roots) if root == node])
        for node in received_nodes
    ]
    # Only three or more gradients have several orders.
    joined = (m for m in meetings if len(m.reached_by) > 1 and (m.outputs or m.edges > 2))
    return Crossing(tuple(arrivals), tuple(sorted(joined)))


def reordered(crossings: Mapping[int, Crossing]) -> list[int]:
    """Returns the stages that may add gradients in another order than the uncut model does.

    Args:
        crossings: The crossings of all stages of a chain, by stage.

    Returns:
        The numbers of the stages, in ascending order.
    """
    stages = []
    # For each output of the stage that is looked at next, the number of gradients that one graph of
    # the model adds up there: the terms of the sum that later stages send back.
    sums: list[int] = []
    for stage in sorted(crossings, reverse=True):
        # The loss, the only output of the last stage, has one gradient.
        crossing, count = crossings[stage], sums or [1]
        reached_by = (
            i for meetings in crossing for meeting in meetings for i in meeting.reached_by
        )
        outputs = 1 + max(reached_by, default=0)
        if outputs > len(count):
            # A captured model also has edges to later stages, whose gradients may all be sums.
            count = [2] * outputs
        # Three or more gradients meet, and come from several outputs.
        if any(
            meeting.edges + sum(count[i] for i in meeting.outputs) > 2
            and sum(count[i] > 0 for i in meeting.reached_by) > 1
            for meeting in crossing.joined
        ):
            stages.append(stage)
        sums = [
            meeting.edges + sum(count[i] for i in meeting.outputs) for meeting in crossing.received
        ]
    return stages[::-1]
