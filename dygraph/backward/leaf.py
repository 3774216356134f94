"""Leaf layers, and whether the gradients of their parameters can wait for W.

A split backward computes the gradients of a stage's inputs in action I, and those of its
parameters (the weight gradients) later, in action W. A leaf layer owns parameters, and its
sublayers own none. The weight gradients of Paddle's leaf layers in ``WAITING`` can wait for W:
these layers compute from their arguments and parameters only, and store nothing. Any other layer
may compute something else in each call, and may store a tensor besides its output. So its forward
runs once, unchanged, and all of its gradients are computed in I.

Which tensors need a gradient decides which operations Paddle runs backward: this is the situation
of a call. In each new situation, a layer that can wait runs once more, only to inspect its graph.

Some of Paddle's kernels cannot compute only a part of their gradients: without the weight's
gradient, layer_norm ignores its weight on CPU, batch_norm computes something else if a channel has
one value, and prelu crashes. So a layer that runs a kernel outside of ``DIVISIBLE``, as may happen
on a GPU, runs unchanged, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from fleetpipe.aliases import GradNode, Layer, Nest, Tensor
from fleetpipe.dygraph.nest import leaves, leaves_like, needs_gradient, replace
from fleetpipe.dygraph.random_keys import random_states_kept
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import buffers_in, is_static, parameters_in

#: Types of arguments that hold no tensor.
_TYPES_WITHOUT_TENSORS = (
    *(bool, int, float, complex, str, bytes, slice, type(None), np.generic, np.ndarray),
    type(paddle.float32),
)

#: Operations of several next_nodes whose gradients have the same bits if only some of them are
#: computed: tested on 2.6.2 and 3.3.1. An operation of one operand has one gradient.
DIVISIBLE = frozenset(
    {
        *("MatmulGradNode", "AddGradNode", "SubtractGradNode", "MultiplyGradNode"),
        *("Conv2dGradNodeFinal", "DepthwiseConv2dGradNode", "Conv3dGradNode"),
        *("Conv2dTransposeGradNode", "BilinearGradNode"),
        # The operations that join and add the blocks of a tensor-parallel layer.
        *("ConcatGradNode", "GradNodePyLayer__SumOfBlocks"),
    }
)

#: The names of the layer classes, of Paddle and of fleetpipe, whose weight gradients can wait.
WAITING = frozenset(
    {
        *("Linear", "Embedding", "Bilinear", "SimpleRNNCell", "LSTMCell", "GRUCell"),
        *(f"Conv{axes}D{kind}" for axes in (1, 2, 3) for kind in ("", "Transpose")),
        *("ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"),
        *("ColumnSequenceParallelLinear", "RowSequenceParallelLinear"),
    }
)

#: Attributes that a user's subclass of a layer may define without changing what it computes.
_HARMLESS_ATTRIBUTES = frozenset(
    {
        *("__init__", "__module__", "__doc__", "__annotations__", "extra_repr", "blocks"),
        *("__firstlineno__", "__static_attributes__"),
    }
)

#: Paddle's classes of tensors and parameters.
_TENSOR_CLASSES = frozenset({paddle.Tensor, *paddle.Tensor.__subclasses__()})

#: What decides which operations Paddle runs backward in a call: the number of tensors among its
#: arguments; and for each of these, then for each parameter of the layer, whether it needs a
#: gradient.
Situation = tuple[int, tuple[bool, ...]]


class CannotWait(Exception):
    """The weight gradients of a call of a leaf layer cannot wait for W."""


class CallProperties(NamedTuple):
    """The properties that all calls of a leaf layer in one situation have.

    Attributes:
        divisible: Whether the gradients of inputs and parameters can be computed separately.
        reached: For each input that needs a gradient, in order, whether some output depends on it.
        depth: The number of operations on the longest path from the outputs to the inputs.
        has_one_path: Whether only one output depends on only one input, which only one operation
            takes; then no gradients are summed at the input.
    """

    divisible: bool = True
    reached: tuple[bool, ...] = ()
    depth: int = 0
    has_one_path: bool = True


class Leaf:
    """A leaf layer, and the properties of its calls so far.

    Attributes:
        layer: The layer.
        name: Its path in the whole model.
        properties_of_calls: The properties of its calls, by situation.
        divisible: Whether the gradients of inputs and parameters could be computed separately in
            all calls so far.
        static: Whether its forward is a part of a static graph, in which it must not be replaced.
    """

    def __init__(self, layer: Layer, name: str, static: bool) -> None:
        """Creates a leaf with no calls yet; the attributes have the names of the arguments."""
        self.layer = layer
        self.name = name
        self.static = static
        self.properties_of_calls: dict[Situation, CallProperties] = {}
        self.divisible = True

    @property
    def parameters(self) -> list[Tensor]:
        """Returns the layer's current parameters, each once."""
        owned = parameters_in(self.layer).values()
        return list({id(tensor): tensor for tensor in owned if tensor is not None}.values())

    @property
    def waits(self) -> bool:
        """Whether the layer's weight gradients can wait, by its class and its earlier calls."""
        return self.divisible and not self.static and can_wait(self.layer)


def can_wait(layer: Layer) -> bool:
    """Whether ``layer`` is of a class in ``WAITING``, or of a subclass that computes the same."""
    kind: Any = type(layer)
    # Not by __module__: a wrapper has the __module__ of the function that it wraps.
    module: str = getattr(kind.forward, "__globals__", {}).get("__name__", "")
    is_of_library = module.partition(".")[0] in ("paddle", "fleetpipe")
    is_replaced = "forward" in vars(layer)
    return is_of_library and not is_replaced and _has_waiting_forward(kind, kind.forward)


@functools.lru_cache(maxsize=256)
def _has_waiting_forward(kind: type[Layer], forward: Callable[..., Nest]) -> bool:
    """Whether a layer class computes as one in ``WAITING``: it overrides none of its methods."""
    if forward.__qualname__.removesuffix(".forward") not in WAITING:
        return False
    bases = kind.__mro__
    number = next(i for i, base in enumerate(bases) if vars(base).get("forward") is forward)
    names = frozenset(dir(bases[number])) - _HARMLESS_ATTRIBUTES
    return not any(
        name in names or isinstance(value, property)
        for subclass in bases[:number]
        for name, value in vars(subclass).items()
    )


def has_parameters_alone(layer: Layer, parameters: Iterable[Tensor]) -> bool:
    """Whether a layer's only tensors are its parameters, and no operation has computed these.

    Otherwise an operation may compute its weight, as ``weight_norm`` does before each call.
    """
    holds_no_others = not buffers_in(layer) and _TENSOR_CLASSES.isdisjoint(
        map(type, vars(layer).values())
    )
    return holds_no_others and all(parameter.is_leaf for parameter in parameters)


def leaves_of(index: int, layer: Layer) -> Iterator[Leaf]:
    """Yields the leaf layers within a layer; ``index`` is the layer's number in the whole list."""
    if not isinstance(layer, paddle.nn.Layer):
        return
    static: set[int] = set()
    for path, sublayer in layer.named_sublayers(prefix=str(index), include_self=True):
        parameters = sublayer.parameters(include_sublayers=False)
        if parameters and all(not inner.parameters() for inner in sublayer.sublayers()):
            yield Leaf(sublayer, path, id(sublayer) in static)
        if is_static(sublayer):
            static.update(map(id, sublayer.sublayers()))


def inspect_call(
    parameters: Iterable[Tensor],
    forward: Callable[..., Nest],
    args: tuple[Nest, ...],
    named: dict[str, Nest],
) -> CallProperties:
    """Runs a layer that can wait, drops the result, and returns the properties of such calls.

    The random states stay as they are.

    Args:
        parameters: The parameters of the layer.
        forward: The layer's forward.
        args: The positional arguments of the call.
        named: The keyword arguments of the call.

    Raises:
        Exception: Any error of the call.
    """
    # Paddle never frees a node that Python refers to: so these nodes must save no tensors.
    unsaved = paddle.autograd.saved_tensors_hooks(lambda _tensor: None, lambda _saved: None)
    stand_ins = leaves_like(tensors_in((args, named)))
    with unsaved, random_states_kept():
        output = forward(*replace(args, stand_ins), **replace(named, stand_ins))
    outputs = [tensor for tensor in tensors_in(output) if needs_gradient(tensor)]
    inputs = [tensor.grad_fn for tensor in stand_ins.values() if needs_gradient(tensor)]
    # The nodes at which backward ends: those of inputs and of parameters.
    ends = {*inputs, *(parameter.grad_fn for parameter in parameters if needs_gradient(parameter))}
    roots = [tensor.grad_fn for tensor in outputs]
    nodes = find_nodes(roots, ends)
    successors = {node: next_nodes(node) for node in nodes - ends}
    reached = tuple(node in nodes for node in inputs)
    divisible = all(
        # Paddle 2.6.2 adds a suffix to the name of a PyLayer's node.
        len(following) == 1 or node.name().removesuffix("_backward") in DIVISIBLE
        for node, following in successors.items()
    )
    lengths = _longest_paths(set(inputs), successors)
    lengths_to_inputs = [lengths[root] for root in roots if lengths[root] >= 0]
    depth = max(lengths_to_inputs, default=0)
    uses = [node for node in (*roots, *chain(*successors.values())) if node in inputs]
    # A layer that runs unchanged keeps its order of sums.
    has_one_path = not divisible or not any(reached) or len(lengths_to_inputs) == len(uses) == 1
    return CallProperties(divisible, reached, depth, has_one_path)


def _longest_paths(
    ends: set[GradNode], successors: Mapping[GradNode, Sequence[GradNode]]
) -> dict[GradNode, int]:
    """Returns the length of the longest path to ``ends`` from each node; -1 if there is none.

    Args:
        ends: The nodes at which paths end.
        successors: The nodes to which each of the other nodes passes gradients.
    """
    lengths = dict.fromkeys(ends, 0)
    stack = list(successors)
    while stack:
        node = stack[-1]
        following = successors.get(node, ())
        unknown = [successor for successor in following if successor not in lengths]
        if unknown:
            stack += unknown
            continue
        stack.pop()
        if node not in lengths:
            longest = max((lengths[successor] for successor in following), default=-1)
            lengths[node] = longest + 1 if longest >= 0 else -1
    return lengths


def find_nodes(roots: Iterable[GradNode], ends: set[GradNode]) -> set[GradNode]:
    """Returns the nodes that backward from ``roots`` reaches; it does not go beyond ``ends``."""
    seen: set[GradNode] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            if node not in ends:
                stack += next_nodes(node)
    return seen


def next_nodes(node: GradNode) -> list[GradNode]:
    """Returns the nodes to which a node of a backward graph passes gradients."""
    # None stands for an operand that needs no gradient.
    return [successor for successor in node.next_functions if successor is not None]


def tensors_in(value: Nest) -> list[Tensor]:
    """Returns the distinct tensors in nested tuples, lists and dicts, in order.

    Raises:
        CannotWait: Another object is in ``value``, which may hold tensors that are not found.
    """
    tensors: dict[int, Tensor] = {}
    for _, leaf in leaves(value, exact=True):
        if isinstance(leaf, paddle.Tensor):
            tensors.setdefault(id(leaf), leaf)
        elif not isinstance(leaf, _TYPES_WITHOUT_TENSORS):
            raise CannotWait
    return list(tensors.values())
