"""Defines a capture, the nodes of one run of a model's forward, and finds the nodes of a run.

Start with ``Capture`` and ``Node``. A node is a call of a sublayer, or an operation outside of any
(glue). Layers without sublayers, and Paddle's own, are nodes; other layers are opened:
``NodeFinder`` finds the nodes within. A value is a tensor that a node or the caller hands to nodes;
it has a number. Nodes are in the order in which they ran, except hooks on gradients, which come
right after the node that computes their value: in a later stage they would see only that stage's
part of a gradient.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.capture.tracing.user_lines import (
    in_checking_function,
    tests_before_raise,
    user_location,
)
from fleetpipe.dygraph import nest
from fleetpipe.errors import CaptureError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.eager_operations import (
    GRAD_HOOKS,
    SHARED_BY_RECOMPUTE,
    Function,
    set_data,
)
from fleetpipe.paddle_api.layer import buffers_in, has_hooks, sublayers_in

#: The number of a value in a capture.
ValueId = int

#: The bytes of an element by dtype; any other dtype has 4.
_ELEMENT_BYTES = {"float64": 8, "int64": 8, "complex64": 8, "complex128": 16} | {
    "float16": 2, "bfloat16": 2, "int16": 2, "bool": 1, "uint8": 1, "int8": 1
}  # fmt: skip

#: Paddle's own layers that are opened, since they only call other layers.
_OPENED = (
    *("Sequential", "Transformer", "TransformerEncoder", "TransformerDecoder"),
    *("LayerList", "LayerDict"),
)


class Ref(NamedTuple):
    """The placeholder, in a node's arguments, for an output of a node or an input of the model."""

    value: ValueId


class StateRef(NamedTuple):
    """The placeholder in a node's arguments for a parameter or buffer of the model.

    Attributes:
        layer: The layer that has the parameter or buffer.
        name: Its name in that layer.
        path: Its name in the whole model.
    """

    layer: Layer
    name: str
    path: str

    @property
    def tensor(self) -> Any:
        """The parameter or buffer that the layer has now."""
        return getattr(self.layer, self.name)


class Scope(NamedTuple):
    """One call of a layer in a run.

    Attributes:
        path: The path of the layer in the model; "" for the model itself.
        call: The number of the call of this layer, from 0.
    """

    path: str
    call: int

    def __str__(self) -> str:
        return self.path + (f" (call {self.call + 1})" if self.call else "")


class TensorSpec(NamedTuple):
    """The shape of a tensor and the name of its dtype."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """The number of bytes of the tensor's data."""
        return math.prod(self.shape) * _ELEMENT_BYTES.get(self.dtype, 4)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def spec_of(tensor: Tensor) -> TensorSpec:
    """Returns the shape and dtype of a tensor."""
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).rpartition(".")[2])


class Mode(NamedTuple):
    """A layer, and whether it is in training rather than in evaluation."""

    layer: Layer
    training: bool

    def put_back(self) -> None:
        """Sets the layer to this mode, and leaves the modes of its sublayers unchanged."""
        self.layer.training = self.training


@dataclass(frozen=True)
class Node:
    """A call of a sublayer, or an operation outside of any such call.

    Attributes:
        function: The called layer or function of Paddle's.
        args: The arguments, nested, with :class:`Ref` and :class:`StateRef` in place of tensors.
        named: The keyword arguments.
        outputs: The number of the value of each tensor that the node returns, in order.
        written: For each value that the node writes into in place, a pair: its number before, and
            the number of the new value afterwards.
        scopes: The calls of layers around the node, from the model inwards; the last one is the
            node's own call if it calls a sublayer.
        location: File and line of the user's code that made the call.
        grad: Whether gradients were on.
        state: The names of the model's parameters and buffers that the node uses: those of its
            layer, those among its arguments, and those that share memory with an argument.
        modes: The layers in the called layer, each with its mode.
        casts: Returns the context of automatic casts that the forward has opened around the node;
            None if the node runs under the casts of the batch.
    """

    function: Callable[..., Any]
    args: tuple[Nest, ...]
    named: dict[str, Nest]
    outputs: tuple[ValueId, ...]
    written: tuple[tuple[ValueId, ValueId], ...]
    scopes: tuple[Scope, ...]
    location: str
    grad: bool = True
    state: frozenset[str] = frozenset()
    modes: tuple[Mode, ...] = ()
    casts: Callable[[], AbstractContextManager[object]] | None = None

    @property
    def is_layer(self) -> bool:
        """Whether this node is a call of a sublayer, rather than of a function of Paddle's."""
        return isinstance(self.function, paddle.nn.Layer)

    @property
    def name(self) -> str:
        """The node's name in messages: a layer's path; an operation's layer and its own name."""
        if self.is_layer:
            return str(self.scopes[-1])
        layer = str(self.scopes[-1])
        name = str(getattr(self.function, "__name__", self.function)).strip("_")
        return f"{layer}: {name}" if layer else name

    @cached_property
    def uses(self) -> set[ValueId]:
        """The numbers of the values that the node takes as inputs."""
        return {leaf.value for leaf in arguments(self) if isinstance(leaf, Ref)}

    @property
    def makes(self) -> set[ValueId]:
        """The numbers of the values that the node returns, or creates by writing in place."""
        return {*self.outputs, *(new for _, new in self.written)}

    @property
    def state_refs(self) -> list[StateRef]:
        """The placeholders of the parameters and buffers among the node's arguments."""
        return [leaf for leaf in arguments(self) if isinstance(leaf, StateRef)]


def arguments(node: Node) -> Iterator[Nest]:
    """Yields the leaves of a node's nested arguments: placeholders, constants and plain values."""
    return (leaf for _, leaf in parts((node.args, node.named)))


def parts(value: Nest, path: nest.Path = ()) -> Iterator[tuple[nest.Path, Nest]]:
    """Yields the leaves of nested tuples, lists, dicts and slices, each after its path.

    Args:
        value: The nested containers.
        path: The keys and indices that lead to ``value``.
    """
    if isinstance(value, (Ref, StateRef)):
        yield path, value
    elif isinstance(value, slice):
        yield from parts([value.start, value.stop, value.step], path)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from parts(item, (*path, key))
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from parts(item, (*path, index))
    else:
        yield path, value


def map_parts(value: Nest, change: Callable[[Nest], Nest]) -> Nest:
    """Returns nested tuples, lists, dicts and slices with ``change(leaf)`` for each leaf."""
    if isinstance(value, slice):
        return slice(*(map_parts(part, change) for part in (value.start, value.stop, value.step)))
    if isinstance(value, dict):
        return {key: map_parts(item, change) for key, item in value.items()}
    if isinstance(value, (tuple, list)) and not isinstance(value, (Ref, StateRef)):
        return nest.rebuild(value, [map_parts(item, change) for item in value])
    return change(value)


@dataclass(frozen=True)
class Capture:
    """One run of a model's forward.

    Attributes:
        nodes: The nodes, in order.
        inputs: The model's inputs, nested, with :class:`Ref` in place of tensors.
        outputs: The model's outputs, nested, with :class:`Ref` in place of tensors.
        specs: The shape and dtype of each value, by its number.
        pipe_splits: For each call of ``pipe_split`` the number of the node after it.
        changed: The parameters and buffers that the forward wrote into, by name.
        numbers: The buffers whose numbers Python code has read, so that they must stay constant.
        switched: The layers that the forward switched between training and evaluation, each with
            the mode in which the forward left it.
        switched_at: File and line of the first such switch.
        unopened: By a layer's path, why the layer is one node though it has sublayers.
        left_out: Texts for actions of the forward that no stage repeats, with file and line.
        draws: Whether nodes drew from generators of Python's or NumPy's.
        data_dependent: The numbers of the values whose sizes depend on the numbers in a batch.
    """

    nodes: tuple[Node, ...]
    inputs: Nest
    outputs: Nest
    specs: tuple[TensorSpec, ...]
    pipe_splits: tuple[int, ...] = ()
    changed: Mapping[str, StateRef] = field(default_factory=dict)
    numbers: tuple[StateRef, ...] = ()
    switched: tuple[Mode, ...] = ()
    switched_at: str = ""
    unopened: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    draws: bool = False
    data_dependent: frozenset[ValueId] = frozenset()

    @cached_property
    def input_values(self) -> list[ValueId]:
        """The numbers of the values that are the model's inputs, in order."""
        return values_in(self.inputs)

    @cached_property
    def output_values(self) -> list[ValueId]:
        """The numbers of the values that the model returns, in order."""
        return values_in(self.outputs)

    def maker(self, value: ValueId) -> int | None:
        """Returns the number of the node that first creates a value; None for a model input."""
        return self._makers.get(value)

    @cached_property
    def _makers(self) -> dict[ValueId, int | None]:
        """The result of :meth:`maker` for each value."""
        makers: dict[ValueId, int | None] = {}
        for number in reversed(range(len(self.nodes))):
            makers.update(dict.fromkeys(self.nodes[number].makes, number))
        return {**makers, **dict.fromkeys(self.input_values)}

    @cached_property
    def calls(self) -> dict[Scope, tuple[int, int]]:
        """The numbers of the first and the last node of each call of a layer."""
        first: dict[Scope, int] = {}
        last: dict[Scope, int] = {}
        for number, node in enumerate(self.nodes):
            for scope in node.scopes:
                first.setdefault(scope, number)
                last[scope] = number
        return {scope: (first[scope], last[scope]) for scope in first}

    @cached_property
    def live_bytes(self) -> list[int]:
        """For each node, the bytes of the values made before it that it or a later node uses.

        An output of the model counts for all nodes after the one that makes it.
        """
        last = dict.fromkeys(self.output_values, len(self.nodes))
        for number, node in reversed(list(enumerate(self.nodes))):
            for value in node.uses:
                last.setdefault(value, number)
        changes = [0] * (len(self.nodes) + 2)
        for value, end in last.items():
            maker = self.maker(value)
            changes[0 if maker is None else maker + 1] += self.specs[value].nbytes
            changes[end + 1] -= self.specs[value].nbytes
        return list(accumulate(changes))[: len(self.nodes)]


def values_in(value: Nest) -> list[ValueId]:
    """Returns the numbers of the values in nested arguments, in order."""
    return [leaf.value for _, leaf in parts(value) if isinstance(leaf, Ref)]


def move_hooks_to_makers(
    nodes: Sequence[Node], positions: Sequence[int]
) -> tuple[list[Node], list[int]]:
    """Moves each node that registers or removes a gradient hook right after its value's maker.

    Args:
        nodes: The nodes in the order in which they ran.
        positions: Numbers of nodes before which ``pipe_split`` was called.

    Returns:
        The nodes in their new order, and the positions in that order.
    """
    makers: dict[int, int] = {}
    moved: dict[int, list[Node]] = {}
    staying: list[int] = []
    for number, node in enumerate(nodes):
        is_hook = getattr(node.function, "__name__", "") in GRAD_HOOKS
        hooked = node.args[0] if is_hook else None
        maker = makers.get(hooked.value) if isinstance(hooked, Ref) else None
        if maker is None:
            staying.append(number)
            makers.update(dict.fromkeys(node.makes, number))
        else:
            made_in = nodes[maker].scopes[:-1] if nodes[maker].is_layer else nodes[maker].scopes
            moved.setdefault(maker, []).append(replace(node, scopes=made_in))
    ordered: list[Node] = []
    # The new position of each old one; that of a moved node is that of the next node that stays.
    new_positions: list[int] = []
    for number in staying:
        new_positions += [len(ordered)] * (number + 1 - len(new_positions))
        ordered += [nodes[number], *moved.get(number, ())]
    new_positions += [len(ordered)] * (len(nodes) + 1 - len(new_positions))
    return ordered, [new_positions[position] for position in positions]


class Unopened:
    """Decides which layers are not opened, so that a call of one is a single node.

    It also stores facts that runs of the model have shown. If a run adds a fact, :attr:`changes`
    grows, and the captures of earlier runs are outdated.

    Attributes:
        written: The names of the parameters and buffers that some run has written into.
        data_dependent_nodes: The names of nodes whose outputs have data-dependent sizes.
    """

    def __init__(self, classes: Iterable[type] = ()) -> None:
        """Stores the classes whose layers are never opened."""
        #: By class, why its layers are not opened.
        self._reasons = dict.fromkeys(classes, "its class is in no_split")
        #: By path, whether a layer is opened; see :meth:`opens`.
        self._opened: dict[str, bool] = {}
        self.written: set[str] = set()
        self.data_dependent_nodes: set[str] = set()
        self._added = 0

    @property
    def changes(self) -> int:
        """How many facts were added so far; if it has grown, earlier captures may be outdated."""
        return self._added + len(self.written)

    def add(self, layer_class: type, reason: str) -> None:
        """Adds a class whose layers are not opened, and why."""
        self._reasons[layer_class] = reason
        self._added += 1
        self.forget_decisions()

    def forget_decisions(self) -> None:
        """Makes :meth:`opens` decide anew on each layer, whose hooks may have changed."""
        self._opened.clear()

    def add_data_dependent_node(self, node: str) -> None:
        """Adds the name of a node whose outputs have data-dependent sizes."""
        self.data_dependent_nodes.add(node)
        self._added += 1

    def opens(self, path: str, layer: Layer) -> bool:
        """Returns whether a layer is opened; for each path the first answer is kept."""
        if path not in self._opened:
            self._opened[path] = self.reason(layer) is None
        return self._opened[path]

    def reason(self, layer: Layer) -> str | None:
        """Returns why a layer is not opened, a phrase about "it"; None if it is opened."""
        kind = type(layer)
        if not sublayers_in(layer):
            return "it has no sublayers"
        if kind in self._reasons:
            return self._reasons[kind]
        if has_hooks(layer):
            return "it has hooks of the user's"
        # By its class: the attribute itself compiles.
        if hasattr(type(layer.forward), "concrete_program"):
            return "its forward is compiled by to_static"
        if kind.__module__.startswith("paddle.nn.") and kind.__name__ not in _OPENED:
            return "it is one of Paddle's"
        return None


def arguments_of(inputs: Nest) -> tuple[tuple[Nest, ...], dict[str, Nest]]:
    """Splits a model's inputs into positional and keyword arguments of its forward."""
    if isinstance(inputs, dict):
        return (), inputs
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    return (inputs,), {}


class NodeCall(NamedTuple):
    """A call of a node, before it is made.

    Attributes:
        function: The layer or the function of Paddle's that the node stands for.
        call: The function that makes the call when it gets the arguments.
        args: The positional arguments.
        named: The keyword arguments.
        scopes: The calls of layers around the node; a layer's own call is the last.
    """

    function: Function
    call: Function
    args: tuple[Any, ...]
    named: dict[str, Any]
    scopes: tuple[Scope, ...]

    @property
    def is_users(self) -> bool:
        """Whether the node calls a layer of the user's: its class is not Paddle's."""
        kind = type(self.function)
        return issubclass(kind, paddle.nn.Layer) and not kind.__module__.startswith("paddle.nn.")

    def do(self) -> Any:
        """Makes the call, and returns its output."""
        return self.call(*self.args, **self.named)


def require_same(tensor: Tensor, expected: bool, place: str) -> None:
    """Raises an error if a check in the forward has another result than in the captured run.

    It is the function of the node that :meth:`NodeFinder.read` adds for a check.

    Args:
        tensor: The tensor whose truth the code checks.
        expected: The result in the captured run.
        place: File and line of the check.

    Raises:
        CaptureError: The results differ.
    """
    if bool(tensor) != expected:
        raise CaptureError(
            "a batch does not pass a check of the model's own forward",
            where=place,
            cause="the plain model raises an error for it there",
            fix="call the plain model with this batch to see which, and mend the data",
        )


class NodeFinder:
    """Finds the nodes of a run of a model's forward, and runs each through :meth:`node`.

    It is an :class:`~fleetpipe.paddle_api.eager_operations.OperationListener`: its public methods
    are called in place of the operations and layers of the forward. The call that the code would
    have made is ``function(*args, **named)``; a method returns what the code gets as its result.
    Subclasses override :meth:`node`, and other methods if they must notice such a call.

    Args:
        model: The model whose forward runs.
        unopened: Decides which layers are nodes.
    """

    def __init__(self, model: Layer, unopened: Unopened) -> None:
        self._model = model
        self._unopened = unopened
        #: By id, the path of each layer of the model.
        self._paths = {id(layer): path for path, layer in model.named_sublayers(include_self=True)}
        #: By path, how often a layer was called in this run.
        self._calls: Counter[str] = Counter()
        #: The calls of the opened layers that are running, from the model inwards, and the layers.
        self._scopes: list[Scope] = []
        self._opened: list[Layer] = []
        #: Whether a node is running: what happens inside of it is no node.
        self._in_node = False
        #: By layer and name, the first tensor of each buffer that the run has replaced.
        self._replaced: dict[tuple[int, str], Tensor] = {}

    def node(self, call: NodeCall) -> Any:
        """Makes the call of a node, and returns its output."""
        return call.do()

    def enter_layer(self, layer: Layer) -> None:
        """Does nothing; subclasses act before an opened layer's forward."""

    def leave_layer(self, output: Nest) -> None:
        """Does nothing; subclasses act on the outputs of an opened layer after its forward."""

    def operation(self, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Runs an operation of Paddle's, as a node unless within a running node.

        Args:
            function: The operation.
            args: Its positional arguments.
            named: Its keyword arguments.

        Returns:
            The output of the operation.
        """
        if self._in_node:
            return function(*args, **named)
        if function.__name__ == SHARED_BY_RECOMPUTE:
            # The copy that recompute makes is left out, since no gradient would pass it.
            return args[0]
        return self._single_node(NodeCall(function, function, args, named, tuple(self._scopes)))

    def layer(self, call: Function, layer: Layer, args: tuple[Any, ...], named: Any) -> Any:
        """Calls a layer, opened or as a node, and returns its output.

        Args:
            call: ``call(layer, *args, **named)`` makes the call.
            layer: The layer. One that the model does not contain is called as plain code.
            args: The positional arguments.
            named: The keyword arguments.
        """
        path = self._paths.get(id(layer))
        if self._in_node or path is None:
            return call(layer, *args, **named)
        scope = Scope(path, self._calls[path])
        self._calls[path] += 1
        if layer is not self._model and not self._unopened.opens(path, layer):

            def call_layer(*args: Any, **named: Any) -> Any:
                """Makes the call of the node, whose arguments do not include the layer."""
                return call(layer, *args, **named)

            scopes = (*self._scopes, scope)
            return self._single_node(NodeCall(layer, call_layer, args, named, scopes))
        self._scopes.append(scope)
        self._opened.append(layer)
        self.enter_layer(layer)
        output = call(layer, *args, **named)
        self.leave_layer(output)
        self._scopes.pop()
        self._opened.pop()
        return output

    def read(self, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Calls a function that reads the numbers in a tensor, and returns its result.

        If the code reads them for a check that raises an error, a node is added that checks too.
        """
        value = function(*args, **named)
        if (
            not self._in_node
            and args[0].dtype == paddle.bool
            and (tests_before_raise() or in_checking_function())
        ):
            check = (args[0], bool(np.all(value)), user_location())
            self._single_node(NodeCall(require_same, require_same, check, {}, tuple(self._scopes)))
        return value

    def shape(self, tensor: Tensor, shape: list[int]) -> list[Any]:
        """Returns what code gets when it reads the shape of ``tensor``: ``shape``, unchanged."""
        return shape

    def backward(self, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Calls a function that computes gradients, and returns its result."""
        return function(*args, **named)

    def recompute(self, call: Function, function: Function, args: tuple[Any, ...]) -> Any:
        """Calls a function that the code passes to Paddle's ``recompute``; returns its output.

        Inside of a node, ``recompute`` runs. Elsewhere the function is called without it: the
        pipeline has its own options for that.

        Args:
            call: Calls ``recompute(function, *args)``.
            function: The function to recompute.
            args: Its arguments.
        """
        return call() if self._in_node else function(*args)

    def memory(self, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Calls a function that accesses the memory of a tensor, and returns its result.

        Here any such call is allowed; a subclass that records nodes overrides this method.
        """
        return function(*args, **named)

    def assigned(self, put: Function, layer: Layer, name: str, value: Any) -> None:
        """Sets an attribute of a layer by ``put(layer, name, value)``.

        A tensor that replaces a buffer is assigned by a node.
        """
        before = buffers_in(layer).get(name)
        is_another = isinstance(value, paddle.Tensor) and value is not before
        if self._in_node or id(layer) not in self._paths or before is None or not is_another:
            put(layer, name, value)
            return

        def set_buffer(*_: Tensor) -> None:
            put(layer, name, value)

        # In a stage the buffer stays the same object, and gets the memory of the other tensor.
        buffer = self._replaced.setdefault((id(layer), name), before)
        self._single_node(NodeCall(set_data, set_buffer, (buffer, value), {}, tuple(self._scopes)))

    def _single_node(self, call: NodeCall) -> Any:
        """Runs the call of a node by :meth:`node`, and returns its output.

        Operations and layers within it are no nodes.
        """
        self._in_node = True
        try:
            return self.node(call)
        finally:
            self._in_node = False
