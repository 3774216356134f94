"""The layers whose weight gradients can wait, and how that is found out.

A leaf layer owns parameters, and none of its sublayers does. It is examined in a first call whose
result is thrown away: its graph must lead from its outputs to its arguments and its own parameters
and to nothing else. Another call is examined again where other arguments or parameters need a
gradient, because Paddle then runs other operations backward.

Some of Paddle's kernels cannot give a part of their gradients: asked for the input's alone,
layer_norm forgets its weight on CPU, batch_norm computes something else where a channel has one
value, and prelu crashes. A layer that uses any but the kernels in ``DIVISIBLE`` stays as it is: all
of its gradients are computed and added in I.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Callable, NamedTuple

import numpy as np

from fleetpipe.aliases import GradNode, Layer, Nest, Tensor
from fleetpipe.dygraph.backward.output_hooks import noting_hooks
from fleetpipe.dygraph.nest import has_gradient, leaves, leaves_like, replace
from fleetpipe.dygraph.random_keys import random_states_kept
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import is_static, state_slots

#: Classes of arguments that certainly hold no tensor.
_PLAIN = (
    *(bool, int, float, complex, str, bytes, slice, type(None), np.generic, np.ndarray),
    type(paddle.float32),
)

#: Operations of several operands that, asked for some of their gradients, give those with the bits
#: that all would have: tested on 2.6.2 and 3.3.1. An operation of one operand has no choice.
DIVISIBLE = frozenset(
    {
        *("MatmulGradNode", "AddGradNode", "SubtractGradNode", "MultiplyGradNode"),
        *("Conv2dGradNodeFinal", "DepthwiseConv2dGradNode", "Conv3dGradNode"),
        *("Conv2dTransposeGradNode", "BilinearGradNode"),
    }
)


#: Number of tensors taken, whether the layer trains, which of these and its parameters need grads.
Situation = tuple[int, bool, tuple[bool, ...]]


class CannotWait(Exception):
    """Why the weight gradients of a call cannot wait."""


class Nature(NamedTuple):
    """What is known of the calls of a leaf layer in which the same tensors need a gradient.

    Attributes:
        reason: Why the weight gradients cannot wait; "" if they can.
        divisible: Whether gradients of inputs and parameters can be computed apart.
        reached: For each input that needs a gradient, in order, whether the outputs depend on it.
        depth: Operations one after another from the outputs to the inputs, at most.
        straight: Whether these are all that lie between one output and one input.
    """

    reason: str = ""
    divisible: bool = True
    reached: tuple[bool, ...] = ()
    depth: int = 0
    straight: bool = True


class Leaf:
    """A leaf layer and what is known of it.

    Attributes:
        layer: The layer.
        name: Its path in the whole model.
        parameters: Its parameters.
        natures: What was found out about its calls, by their :meth:`situation`.
        uncut: Why some of its calls could not wait, where that was plain without looking.
        waits: Whether no call was found yet whose weight gradients cannot wait.
        static: Whether its forward becomes a part of a static graph, as all around it would.
    """

    def __init__(self, layer: Layer, name: str) -> None:
        """Describes ``layer`` under its path in the whole model."""
        self.layer = layer
        self.name = name
        self.parameters = tuple(layer.parameters(include_sublayers=False))
        self.natures: dict[Situation, Nature] = {}
        self.uncut = ""
        self.waits = True
        self.static = False

    def situation(self, taken: Sequence[Tensor]) -> Situation:
        """Returns what decides which operations Paddle runs backward.

        Args:
            taken: The tensors that a call takes.
        """
        needs = [not tensor.stop_gradient for tensor in (*taken, *self.parameters)]
        return len(taken), self.layer.training, tuple(needs)

    @property
    def reason(self) -> str:
        """Why the weight gradients of some call cannot wait; "" if all can."""
        reasons = [self.uncut, *(nature.reason for nature in self.natures.values())]
        return next(filter(None, reasons), "")

    @property
    def divisible(self) -> bool:
        """Whether gradients of inputs and parameters could be computed apart in every call."""
        return all(nature.divisible for nature in self.natures.values())


def leaves_of(index: int, layer: Layer) -> Iterator[Leaf]:
    """Yields the leaf layers within layer ``index`` of the whole list."""
    if not isinstance(layer, paddle.nn.Layer):
        return
    static: set[int] = set()
    for path, part in layer.named_sublayers(prefix=str(index), include_self=True):
        parameters = part.parameters(include_sublayers=False)
        if parameters and all(not sub.parameters() for sub in part.sublayers()):
            leaf = Leaf(part, path)
            if id(part) in static:
                leaf.static, leaf.uncut = True, "its layer is within paddle.jit.to_static"
            yield leaf
        if is_static(part):
            static.update(map(id, part.sublayers()))


def examine(
    leaf: Leaf, forward: Callable[..., Nest], args: tuple[Nest, ...], named: dict[str, Nest]
) -> Nature:
    """Finds out about the calls of ``leaf`` that are like this one, which leaves no trace.

    Args:
        leaf: The layer.
        forward: Its forward.
        args: Positional arguments of the call.
        named: Keyword arguments of it.
    """
    # Paddle never lets go of a node that Python has asked for: it must hold no tensors.
    unsaved = paddle.autograd.saved_tensors_hooks(_nothing, _nothing)
    with _side_effects_undone(leaf.layer) as before, unsaved:
        try:
            taken = tensors_in((args, named), "was called with")
            # Copies: what the layer writes into one it is to write once, in the call itself.
            stand_ins = leaves_like(taken, copied=True)
            with noting_hooks() as hooked:
                output = forward(*replace(args, stand_ins), **replace(named, stand_ins))
            _require_unchanged(taken, stand_ins, "its argument")
            trained = [p for p in leaf.parameters if has_gradient(p) or has_gradient(before[id(p)])]
            _require_unchanged(trained, before, "its parameter")
            inputs = {id(tensor): tensor for tensor in stand_ins.values() if has_gradient(tensor)}
            if any(id(tensor) not in inputs for tensor in hooked):
                raise CannotWait("its layer puts a hook on the gradient of what it computes")
            return _follow(leaf, list(inputs.values()), output)
        except CannotWait as cause:
            return Nature(str(cause))
        except Exception as error:
            kind = type(error).__name__
            return Nature(f"its layer cannot run on stand-ins for its inputs ({kind})")


def _follow(leaf: Leaf, inputs: list[Tensor], output: Nest) -> Nature:
    """Follows the graph of a call from what it returned."""
    ids = {id(tensor) for tensor in inputs}
    outputs = [t for t in tensors_in(output, "returned") if has_gradient(t) and id(t) not in ids]
    if any(tensor.is_leaf for tensor in outputs):
        raise CannotWait("its layer returns a parameter")
    entries = [tensor.grad_fn for tensor in inputs]
    ends = {*entries, *(p.grad_fn for p in leaf.parameters if has_gradient(p))}
    roots = [tensor.grad_fn for tensor in outputs]
    nodes = nodes_of(roots, ends)
    below = {node: operands(node) for node in nodes - ends}
    if not all(below.values()):
        raise CannotWait(
            "its layer uses a tensor or parameter that is neither its argument nor its own"
        )
    uses = Counter(operand for nodes_below in below.values() for operand in nodes_below)
    if max((uses[node] for node in entries), default=0) > 1 and _are_vectors(leaf.parameters):
        # Autograd would add each of these uses to those of other layers as it comes.
        raise CannotWait("its layer uses an input several times, and has vectors alone to wait for")
    reached = tuple(node in nodes for node in entries)
    # Whatever the call takes: two calls of a layer are to add up their gradients together.
    divisible = all(
        len(nodes_below) == 1 or node.name() in DIVISIBLE for node, nodes_below in below.items()
    )
    ways = [_ways_to(set(entries), below)[root] for root in roots]
    depth = max((length for length, _ in ways), default=0)
    # What stays as it is keeps its order.
    straight = not divisible or not any(reached) or sum(number for _, number in ways) == 1
    return Nature("", divisible, reached, depth, straight)


def _are_vectors(parameters: Iterable[Tensor]) -> bool:
    return all(parameter.ndim <= 1 for parameter in parameters)


def _ways_to(
    ends: set[GradNode], below: Mapping[GradNode, Sequence[GradNode]]
) -> dict[GradNode, tuple[int, int]]:
    """Returns, for each node that leads to ``ends``, the longest way there and how many there are.

    Args:
        ends: Nodes.
        below: What each of the other nodes leads to.
    """
    ways = dict.fromkeys(ends, (0, 1))
    waiting = list(below)
    while waiting:
        node = waiting[-1]
        nodes_below = below.get(node, ())
        ahead = [other for other in nodes_below if other not in ways]
        if ahead:
            waiting += ahead
            continue
        waiting.pop()
        if node not in ways:
            leading = [ways[other] for other in nodes_below if ways[other][1]]
            longest = max((length for length, _ in leading), default=-1)
            ways[node] = longest + 1, sum(number for _, number in leading)
    return ways


def nodes_of(roots: Iterable[GradNode], ends: set[GradNode]) -> set[GradNode]:
    """Returns the nodes of a graph from ``roots`` to ``ends``, or to where it begins."""
    seen: set[GradNode] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            if node not in ends:
                stack += operands(node)
    return seen


def operands(node: GradNode) -> list[GradNode]:
    """Returns the nodes to which a node of a graph hands gradients on."""
    # None stands for an operand that needs no gradient.
    return [other for other in node.next_functions if other is not None]


@contextmanager
def _side_effects_undone(layer: Layer) -> Iterator[dict[int, Tensor]]:
    """Puts random states, parameters, buffers and running statistics back in the end.

    Yields:
        Copies of the parameters and buffers as they were, by the ids of these.
    """
    tensors = [*layer.buffers(), *layer.parameters()]
    copies = leaves_like(tensors, copied=True)
    places = [place for part in layer.sublayers(include_self=True) for place in state_slots(part)]
    held = [(holder, name, holder[name]) for holder, name in places]
    try:
        with random_states_kept():
            yield copies
    finally:
        # What was assigned, self.mean = .., stands in the place of the tensor that was there.
        for holder, name, tensor in held:
            holder[name] = tensor
        for tensor in tensors:
            copy = copies[id(tensor)]
            if not _same_numbers(tensor, copy):
                tensor.set_value(copy)
            tensor.stop_gradient = copy.stop_gradient


def _require_unchanged(tensors: Iterable[Tensor], copies: Mapping[int, Tensor], name: str) -> None:
    """Refuses a call that wrote into a tensor, or switched its gradient on or off.

    Args:
        tensors: The tensors.
        copies: A copy of each by its id. Either of the two was used in the call.
        name: What messages call a tensor.
    """
    for tensor in tensors:
        copy = copies[id(tensor)]
        # Not every write counts as one: set_value does not.
        if copy.inplace_version or not _same_numbers(tensor, copy):
            raise CannotWait(f"its layer writes into {name}")
        if tensor.stop_gradient != copy.stop_gradient:
            raise CannotWait(f"its layer switches the gradient of {name} on or off")


def _same_numbers(tensor: Tensor, other: Tensor) -> bool:
    # By their bits: NaN is the same as NaN.
    one, two = (
        np.ascontiguousarray(either.numpy()).reshape(-1).view(np.uint8)
        for either in (tensor, other)
    )
    return np.array_equal(one, two)


def _nothing(_saved: Tensor) -> None:
    return None


def tensors_in(value: Nest, verb: str) -> list[Tensor]:
    """Returns the distinct tensors in nested tuples, lists and dicts, in order.

    Raises:
        CannotWait: There is another object, which may hold tensors where they cannot be seen.
    """
    tensors: dict[int, Tensor] = {}
    for _, leaf in leaves(value, exact=True):
        if isinstance(leaf, paddle.Tensor):
            tensors.setdefault(id(leaf), leaf)
        elif not isinstance(leaf, _PLAIN):
            raise CannotWait(f"its layer {verb} an object of class {type(leaf).__name__}")
    return list(tensors.values())
