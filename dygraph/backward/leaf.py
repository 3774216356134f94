"""Leaf layers, and whether their weight gradients can wait for W.

A leaf layer owns parameters, and its sublayers own none. The weight gradients of Paddle's leaf
layers in ``WAITING`` can wait: these layers compute from their arguments and parameters only, and
store nothing. Any other forward may compute something else in each call, and may store a tensor
besides its output. So it runs once, unchanged, and all of its gradients are computed in I.

The graph of a layer that can wait is inspected once for each situation, in a call whose result is
dropped: which tensors need a gradient decides which operations Paddle runs backward.

Some of Paddle's kernels cannot compute only a part of their gradients: without the weight's
gradient, layer_norm ignores its weight on CPU, batch_norm computes something else if a channel has
one value, and prelu crashes. A layer with a kernel outside of ``DIVISIBLE``, as may happen on a
GPU, runs unchanged, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from fleetpipe.aliases import GradNode, Layer, Nest, Tensor
from fleetpipe.dygraph.nest import has_gradient, leaves, leaves_like, replace
from fleetpipe.dygraph.random_keys import random_states_kept
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import buffers_in, is_static, parameters_in

#: Types of arguments that hold no tensor.
_PLAIN = (
    *(bool, int, float, complex, str, bytes, slice, type(None), np.generic, np.ndarray),
    type(paddle.float32),
)

#: Operations of several operands whose gradients have the same bits if only some of them are
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

#: The layers of Paddle, and fleetpipe's with the same names, that can wait.
WAITING = frozenset(
    {
        *("Linear", "Embedding", "Bilinear", "SimpleRNNCell", "LSTMCell", "GRUCell"),
        *(f"Conv{axes}D{kind}" for axes in (1, 2, 3) for kind in ("", "Transpose")),
        *("ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"),
        *("ColumnSequenceParallelLinear", "RowSequenceParallelLinear"),
    }
)

#: Attributes that a user's subclass may define without computing something else.
_FREE = frozenset(
    {
        *("__init__", "__module__", "__doc__", "__annotations__", "extra_repr", "blocks"),
        *("__firstlineno__", "__static_attributes__"),
    }
)

#: The classes of tensors.
_TENSORS = frozenset({paddle.Tensor, *paddle.Tensor.__subclasses__()})

#: The number of tensors that a call takes, and which of these and of the parameters need gradients.
Situation = tuple[int, tuple[bool, ...]]


class CannotWait(Exception):
    """The weight gradients of a call of a leaf layer cannot wait for W."""


class Nature(NamedTuple):
    """The properties of a leaf layer's calls in one :func:`situation`.

    Attributes:
        divisible: Whether the gradients of inputs and parameters can be computed separately.
        reached: For each input that needs a gradient, in order, whether the outputs depend on it.
        depth: The number of operations on the longest path from the outputs to the inputs.
        straight: Whether only one output depends on only one input, which only one operation takes.
    """

    divisible: bool = True
    reached: tuple[bool, ...] = ()
    depth: int = 0
    straight: bool = True


class Leaf:
    """A leaf layer, and the properties of its calls.

    Attributes:
        layer: The layer.
        name: Its path in the whole model.
        natures: The properties of its calls, by their :func:`situation`.
        divisible: Whether the gradients of inputs and parameters could be computed separately in
            all calls so far.
        static: Whether its forward is a part of a static graph, in which it must not be replaced.
    """

    def __init__(self, layer: Layer, name: str, static: bool) -> None:
        """Stores the arguments, which the class describes."""
        self.layer = layer
        self.name = name
        self.static = static
        self.natures: dict[Situation, Nature] = {}
        self.divisible = True

    @property
    def parameters(self) -> list[Tensor]:
        """The layer's current parameters, each once."""
        owned = parameters_in(self.layer).values()
        return list({id(tensor): tensor for tensor in owned if tensor is not None}.values())

    @property
    def waits(self) -> bool:
        """Whether gradients can wait, according to the layer's class and its earlier calls."""
        return self.divisible and not self.static and can_wait(self.layer)

    def learn(self, key: Situation, nature: Nature) -> None:
        """Stores the properties of the calls of a :func:`situation`."""
        self.natures[key] = nature
        self.divisible &= nature.divisible


def situation(taken: Sequence[Tensor], parameters: Sequence[Tensor]) -> Situation:
    """Returns the facts about a call that decide which operations Paddle runs backward."""
    return len(taken), tuple([not tensor.stop_gradient for tensor in (*taken, *parameters)])


def is_of_a_library(forward: Callable[..., Nest]) -> bool:
    """Whether a forward is a function of Paddle or of fleetpipe."""
    # Not by __module__: a wrapper has the __module__ of the function that it wraps.
    module: str = getattr(forward, "__globals__", {}).get("__name__", "")
    return module.partition(".")[0] in ("paddle", "fleetpipe")


def can_wait(layer: Layer) -> bool:
    """Whether ``layer`` computes the same as a layer in ``WAITING``."""
    kind: Any = type(layer)
    plain = "forward" not in vars(layer) and is_of_a_library(kind.forward)
    return plain and _is_waiting(kind, kind.forward)


@functools.lru_cache(maxsize=256)
def _is_waiting(kind: type[Layer], forward: Callable[..., Nest]) -> bool:
    """Whether a library's ``forward`` is that of a layer in ``WAITING`` and still unchanged."""
    if forward.__qualname__.removesuffix(".forward") not in WAITING:
        return False
    kinds = kind.__mro__
    number = next(i for i, one in enumerate(kinds) if vars(one).get("forward") is forward)
    names = frozenset(dir(kinds[number])) - _FREE
    return not any(
        name in names or isinstance(value, property)
        for one in kinds[:number]
        for name, value in vars(one).items()
    )


def has_parameters_alone(layer: Layer, parameters: Iterable[Tensor]) -> bool:
    """Whether a layer has no tensors but its parameters, and these are leaves of the graph.

    Otherwise its weight may be computed from others, as ``weight_norm`` does before each call.
    """
    plain = not buffers_in(layer) and _TENSORS.isdisjoint(map(type, vars(layer).values()))
    return plain and all(parameter.is_leaf for parameter in parameters)


def leaves_of(index: int, layer: Layer) -> Iterator[Leaf]:
    """Yields the leaf layers within layer ``index`` of the whole list."""
    if not isinstance(layer, paddle.nn.Layer):
        return
    static: set[int] = set()
    for path, part in layer.named_sublayers(prefix=str(index), include_self=True):
        parameters = part.parameters(include_sublayers=False)
        if parameters and all(not sub.parameters() for sub in part.sublayers()):
            yield Leaf(part, path, id(part) in static)
        if is_static(part):
            static.update(map(id, part.sublayers()))


def examine(
    parameters: Iterable[Tensor],
    forward: Callable[..., Nest],
    args: tuple[Nest, ...],
    named: dict[str, Nest],
) -> Nature:
    """Runs a call of a layer that can wait, and returns the properties of such calls.

    Raises:
        Exception: Any error of the call.
    """
    # Paddle never frees a node that Python refers to: so these nodes must save no tensors.
    unsaved = paddle.autograd.saved_tensors_hooks(_nothing, _nothing)
    stand_ins = leaves_like(tensors_in((args, named)))
    with unsaved, random_states_kept():
        output = forward(*replace(args, stand_ins), **replace(named, stand_ins))
    outputs = [tensor for tensor in tensors_in(output) if has_gradient(tensor)]
    entries = [tensor.grad_fn for tensor in stand_ins.values() if has_gradient(tensor)]
    ends = {*entries, *(parameter.grad_fn for parameter in parameters if has_gradient(parameter))}
    roots = [tensor.grad_fn for tensor in outputs]
    nodes = nodes_of(roots, ends)
    below = {node: operands(node) for node in nodes - ends}
    reached = tuple(node in nodes for node in entries)
    divisible = all(
        # Paddle 2.6.2 adds a suffix to the name of a PyLayer's node.
        len(nodes_below) == 1 or node.name().removesuffix("_backward") in DIVISIBLE
        for node, nodes_below in below.items()
    )
    lengths = _lengths_to(set(entries), below)
    leading = [lengths[root] for root in roots if lengths[root] >= 0]
    depth = max(leading, default=0)
    takers = [node for node in (*roots, *chain(*below.values())) if node in entries]
    # A layer that runs unchanged keeps its order of sums.
    straight = not divisible or not any(reached) or len(leading) == len(takers) == 1
    return Nature(divisible, reached, depth, straight)


def _lengths_to(
    ends: set[GradNode], below: Mapping[GradNode, Sequence[GradNode]]
) -> dict[GradNode, int]:
    """Returns the length of the longest path to ``ends`` from each node; -1 if there is none.

    Args:
        ends: The nodes at which paths end.
        below: The successors of each of the other nodes.
    """
    lengths = dict.fromkeys(ends, 0)
    waiting = list(below)
    while waiting:
        node = waiting[-1]
        nodes_below = below.get(node, ())
        ahead = [other for other in nodes_below if other not in lengths]
        if ahead:
            waiting += ahead
            continue
        waiting.pop()
        if node not in lengths:
            longest = max((lengths[other] for other in nodes_below), default=-1)
            lengths[node] = longest + 1 if longest >= 0 else -1
    return lengths


def nodes_of(roots: Iterable[GradNode], ends: set[GradNode]) -> set[GradNode]:
    """Returns the nodes of a graph from ``roots`` back to ``ends``, or to its leaves."""
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
    """Returns the nodes to which a node of a graph passes gradients."""
    # None stands for an operand that needs no gradient.
    return [other for other in node.next_functions if other is not None]


def _nothing(_saved: Tensor) -> None:
    return None


def tensors_in(value: Nest) -> list[Tensor]:
    """Returns the distinct tensors in nested tuples, lists and dicts, in order.

    Raises:
        CannotWait: An object of another type is among them, which may hold tensors.
    """
    tensors: dict[int, Tensor] = {}
    for _, leaf in leaves(value, exact=True):
        if isinstance(leaf, paddle.Tensor):
            tensors.setdefault(id(leaf), leaf)
        elif not isinstance(leaf, _PLAIN):
            raise CannotWait
    return list(tensors.values())
