"""A capture as a value: the nodes of one run of a model's forward, and how they are found.

Start with ``Capture`` and ``Node``. A node is a call of a sublayer, or an operation outside of any
(glue). Layers without sublayers, and Paddle's own, are nodes; other layers are opened: ``Walk``
finds the nodes within. Nodes are in the order in which they ran, except hooks on gradients, which
come right after the node that computes their value: in a later stage they would see only that
stage's part of a gradient.
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
from fleetpipe.capture.tracing.user_lines import only_checked, only_raises, user_place
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

_SIZES = {"float64": 8, "int64": 8, "float16": 2, "bfloat16": 2, "int16": 2, "bool": 1, "uint8": 1}

#: Paddle's own layers that are opened, since they only call other layers.
_OPENED = (
    *("Sequential", "Transformer", "TransformerEncoder", "TransformerDecoder"),
    *("LayerList", "LayerDict"),
)


class Ref(NamedTuple):
    """A placeholder for a value in arguments."""

    value: ValueId


class Owned(NamedTuple):
    """A placeholder for a parameter or a buffer of the model in arguments.

    Attributes:
        layer: The layer that has it.
        name: Its name in that layer.
        path: Its name in the whole model.
    """

    layer: Layer
    name: str
    path: str


class Scope(NamedTuple):
    """One call of a layer: the layer's path in the model, and the number of the call.

    The model itself has the path "".
    """

    path: str
    call: int

    def __str__(self) -> str:
        return self.path + (f" (call {self.call + 1})" if self.call else "")


class Like(NamedTuple):
    """The shape of a tensor, and its dtype by name."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """The number of bytes of its data."""
        return math.prod(self.shape) * _SIZES.get(self.dtype, 4)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


_SIZES.update(int8=1, complex64=8, complex128=16)


def like(tensor: Tensor) -> Like:
    """Returns shape and dtype of a tensor."""
    return Like(tuple(tensor.shape), str(tensor.dtype).rpartition(".")[2])


class Mode(NamedTuple):
    """A layer with its mode, training or evaluation."""

    layer: Layer
    training: bool

    def put_back(self) -> None:
        """Sets the layer to this mode, and leaves the modes of its sublayers."""
        self.layer.training = self.training


@dataclass(frozen=True)
class Node:
    """A call of a sublayer, or an operation outside of any.

    Attributes:
        function: The called layer or function of Paddle's.
        args: The arguments, nested, with :class:`Ref` and :class:`Owned` in place of tensors.
        named: The keyword arguments.
        outputs: The value of each tensor that it returns, in order.
        written: For each value that the node writes into, the number of the value afterwards.
        scopes: The calls of layers around it, from the model inwards; a sublayer's own call is the
            last.
        place: File and line of the user's code that called it.
        grad: Whether gradients were on.
        state: The names of the model's parameters and buffers that it has, takes, or uses through
            shared memory; one name for each tensor.
        modes: The layers in it, each with its mode.
        casts: Returns the context of automatic casts that the forward has opened around the node;
            None if it runs under those of the batch.
    """

    function: Callable[..., Any]
    args: tuple[Nest, ...]
    named: dict[str, Nest]
    outputs: tuple[ValueId, ...]
    written: tuple[tuple[ValueId, ValueId], ...]
    scopes: tuple[Scope, ...]
    place: str
    grad: bool = True
    state: frozenset[str] = frozenset()
    modes: tuple[Mode, ...] = ()
    casts: Callable[[], AbstractContextManager[object]] | None = None

    @property
    def is_layer(self) -> bool:
        """Whether this node is a call of a sublayer."""
        return isinstance(self.function, paddle.nn.Layer)

    @property
    def name(self) -> str:
        """Its name in messages: the sublayer's path, or the layer around it and the operation."""
        if self.is_layer:
            return str(self.scopes[-1])
        inside = str(self.scopes[-1])
        name = str(getattr(self.function, "__name__", self.function)).strip("_")
        return f"{inside}: {name}" if inside else name

    @cached_property
    def uses(self) -> set[ValueId]:
        """The values that it takes as inputs."""
        return {leaf.value for leaf in arguments(self) if isinstance(leaf, Ref)}

    @property
    def makes(self) -> set[ValueId]:
        """The values that it returns, or creates by writing."""
        return {*self.outputs, *(new for _, new in self.written)}

    @property
    def owned(self) -> list[Owned]:
        """The parameters and buffers that it takes, as an operation."""
        return [leaf for leaf in arguments(self) if isinstance(leaf, Owned)]


def arguments(node: Node) -> Iterator[Nest]:
    """Yields the entries of the containers in a node's arguments."""
    return (leaf for _, leaf in parts((node.args, node.named)))


def parts(value: Nest, path: nest.Path = ()) -> Iterator[tuple[nest.Path, Nest]]:
    """Yields the entries of nested tuples, lists, dicts and slices, each with its path."""
    if isinstance(value, (Ref, Owned)):
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
    """Applies ``change`` to each part of nested arguments."""
    if isinstance(value, slice):
        return slice(*(map_parts(part, change) for part in (value.start, value.stop, value.step)))
    if isinstance(value, dict):
        return {key: map_parts(item, change) for key, item in value.items()}
    if isinstance(value, (tuple, list)) and not isinstance(value, (Ref, Owned)):
        return nest.rebuild(value, [map_parts(item, change) for item in value])
    return change(value)


@dataclass(frozen=True)
class Capture:
    """One run of a model's forward.

    Attributes:
        nodes: The nodes, in order.
        inputs: The model's inputs, nested, with :class:`Ref` in place of tensors.
        outputs: The model's outputs, in the same form.
        likes: Shape and dtype of each value.
        marks: For each call of ``pipe_split`` the number of the node after it.
        changed: The parameters and buffers that it wrote into, by name.
        numbers: The buffers whose numbers Python has read, so that they must stay constant.
        switched: The layers that it switched between training and evaluation, as it left them.
        switched_at: File and line of the first such switch.
        unopened: Why a layer with sublayers is a node as a whole, by its path.
        draws: Whether it drew from generators of Python's or NumPy's, within nodes.
        left_out: Its other actions, which no stage repeats, with file and line.
        selected: The values whose sizes depend on numbers.
    """

    nodes: tuple[Node, ...]
    inputs: Nest
    outputs: Nest
    likes: tuple[Like, ...]
    marks: tuple[int, ...] = ()
    changed: Mapping[str, Owned] = field(default_factory=dict)
    numbers: tuple[Owned, ...] = ()
    switched: tuple[Mode, ...] = ()
    switched_at: str = ""
    unopened: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    draws: bool = False
    selected: frozenset[ValueId] = frozenset()

    @cached_property
    def input_values(self) -> list[ValueId]:
        """The values that are the model's inputs."""
        return refs_in(self.inputs)

    @cached_property
    def output_values(self) -> list[ValueId]:
        """The values that the model returns."""
        return refs_in(self.outputs)

    def maker(self, value: ValueId) -> int | None:
        """Returns the node that first creates a value; None for an input."""
        return self._makers.get(value)

    @cached_property
    def _makers(self) -> dict[ValueId, int | None]:
        makers: dict[ValueId, int | None] = {}
        for number in reversed(range(len(self.nodes))):
            makers.update(dict.fromkeys(self.nodes[number].makes, number))
        return {**makers, **dict.fromkeys(self.input_values)}

    @cached_property
    def calls(self) -> dict[Scope, tuple[int, int]]:
        """The first and the last node of each call of a layer."""
        ranges: dict[Scope, tuple[int, int]] = {}
        for number, node in enumerate(self.nodes):
            for scope in node.scopes:
                ranges[scope] = (ranges.get(scope, (number,))[0], number)
        return ranges

    @cached_property
    def alive(self) -> list[int]:
        """For each node, the bytes of earlier values that it or a later node uses."""
        last = dict.fromkeys(self.output_values, len(self.nodes))
        for number, node in reversed(list(enumerate(self.nodes))):
            for value in node.uses:
                last.setdefault(value, number)
        changes = [0] * (len(self.nodes) + 2)
        for value, end in last.items():
            maker = self.maker(value)
            changes[0 if maker is None else maker + 1] += self.likes[value].nbytes
            changes[end + 1] -= self.likes[value].nbytes
        return list(accumulate(changes))[: len(self.nodes)]


def refs_in(value: Nest) -> list[ValueId]:
    """Returns the values in nested arguments, in order."""
    return [leaf.value for _, leaf in parts(value) if isinstance(leaf, Ref)]


def at_makers(nodes: Sequence[Node], marks: Sequence[int]) -> tuple[list[Node], list[int]]:
    """Moves each node that registers or removes a hook right after the node of its value.

    Returns:
        The nodes in their new order, and the marks in it.
    """
    makers: dict[int, int] = {}
    moved: dict[int, list[Node]] = {}
    stay: list[int] = []
    for number, node in enumerate(nodes):
        hooks = getattr(node.function, "__name__", "") in GRAD_HOOKS
        hooked = node.args[0] if hooks else None
        maker = makers.get(hooked.value) if isinstance(hooked, Ref) else None
        if maker is None:
            stay.append(number)
            makers.update(dict.fromkeys(node.makes, number))
        else:
            made_in = nodes[maker].scopes[:-1] if nodes[maker].is_layer else nodes[maker].scopes
            moved.setdefault(maker, []).append(replace(node, scopes=made_in))
    ordered: list[Node] = []
    begins: list[int] = []
    for number in stay:
        begins += [len(ordered)] * (number + 1 - len(begins))
        ordered += [nodes[number], *moved.get(number, ())]
    begins += [len(ordered)] * (len(nodes) + 1 - len(begins))
    return ordered, [begins[mark] for mark in marks]


class Unopened:
    """The layers that are nodes as a whole, and why."""

    def __init__(self, kinds: Iterable[type] = ()) -> None:
        """Stores the classes whose layers are never opened."""
        self._kinds = dict.fromkeys(kinds, "its class is in no_split")
        self._opened: dict[str, bool] = {}
        #: The parameters and buffers that some run has written into, by name.
        self.written: set[str] = set()
        #: The names of nodes whose outputs have sizes that depend on numbers.
        self.selecting: set[str] = set()
        self._added = 0

    @property
    def changes(self) -> int:
        """The number of additions so far; if it has changed, earlier captures may be outdated."""
        return self._added + len(self.written)

    def add(self, kind: type, reason: str) -> None:
        """Adds a class whose layers are not opened."""
        self._kinds[kind] = reason
        self._added += 1
        self.forget()

    def forget(self) -> None:
        """Drops earlier decisions on layers, whose hooks may have changed."""
        self._opened.clear()

    def add_selecting(self, node: str) -> None:
        """Adds a node whose outputs have sizes that depend on numbers."""
        self.selecting.add(node)
        self._added += 1

    def opens(self, path: str, layer: Layer) -> bool:
        """Whether a layer is opened; decided once for a path, whatever hooks the layer gets."""
        if path not in self._opened:
            self._opened[path] = self.reason(layer) is None
        return self._opened[path]

    def reason(self, layer: Layer) -> str | None:
        """Returns why a layer is not opened; None if it is opened."""
        kind = type(layer)
        if not sublayers_in(layer):
            return "it has no sublayers"
        if kind in self._kinds:
            return self._kinds[kind]
        if has_hooks(layer):
            return "it has hooks of the user's"
        # By its class: the attribute itself compiles.
        if hasattr(type(layer.forward), "concrete_program"):
            return "its forward is compiled by to_static"
        if kind.__module__.startswith("paddle.nn.") and kind.__name__ not in _OPENED:
            return "it is one of Paddle's"
        return None


def arguments_of(inputs: Nest) -> tuple[tuple[Nest, ...], dict[str, Nest]]:
    """Splits inputs into positional and keyword arguments."""
    if isinstance(inputs, dict):
        return (), inputs
    return (tuple(inputs), {}) if isinstance(inputs, (tuple, list)) else ((inputs,), {})


class NodeCall(NamedTuple):
    """A call of a node, before it is made.

    Attributes:
        function: The layer or the function of Paddle's to call.
        call: Makes the call with these arguments.
        args: The arguments.
        named: The keyword arguments.
        scopes: The calls of layers around it; a layer's own call is the last.
    """

    function: Function
    call: Function
    args: tuple[Any, ...]
    named: dict[str, Any]
    scopes: tuple[Scope, ...]

    @property
    def is_users(self) -> bool:
        """Whether it calls a layer of a class outside of Paddle."""
        kind = type(self.function)
        return issubclass(kind, paddle.nn.Layer) and not kind.__module__.startswith("paddle.nn.")

    def do(self) -> Any:
        """Makes the call."""
        return self.call(*self.args, **self.named)


def require_same(tensor: Tensor, expected: bool, place: str) -> None:
    """Raises an error if a check in the forward has another result than in the captured run."""
    if bool(tensor) != expected:
        raise CaptureError(
            "a batch does not pass a check of the model's own forward",
            where=place,
            cause="the plain model raises an error for it there",
            fix="call the plain model with this batch to see which, and mend the data",
        )


class Walk:
    """Finds the nodes of a run as a listener of :mod:`fleetpipe.paddle_api.eager_operations`."""

    def __init__(self, model: Layer, unopened: Unopened) -> None:
        self._model = model
        self._unopened = unopened
        self._paths = {id(part): path for path, part in model.named_sublayers(include_self=True)}
        self._calls: Counter[str] = Counter()
        self._scopes: list[Scope] = []
        self._opened: list[Layer] = []
        self._inside = False
        #: By layer and name, the first tensor of each buffer that the run has replaced.
        self._replaced: dict[tuple[int, str], Tensor] = {}

    def node(self, call: NodeCall) -> Any:
        """Makes the call of a node; operations inside of it are no nodes."""
        return call.do()

    def enter_layer(self, layer: Layer) -> None:
        """Called before an opened layer's forward."""

    def leave_layer(self, output: Nest) -> None:
        """Called with the outputs of an opened layer."""

    def operation(self, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """See :class:`fleetpipe.paddle_api.eager_operations.OperationListener`."""
        if self._inside:
            return function(*args, **named)
        if function.__name__ == SHARED_BY_RECOMPUTE:
            # The copy that recompute makes is left out, since no gradient would pass it.
            return args[0]
        return self._single_node(NodeCall(function, function, args, named, tuple(self._scopes)))

    def layer(self, call: Function, layer: Layer, args: tuple[Any, ...], named: Any) -> Any:
        """See :class:`fleetpipe.paddle_api.eager_operations.OperationListener`."""
        path = self._paths.get(id(layer))
        if self._inside or path is None:
            return call(layer, *args, **named)
        scope = Scope(path, self._calls[path])
        self._calls[path] += 1
        if layer is not self._model and not self._unopened.opens(path, layer):

            def called(*args: Any, **named: Any) -> Any:
                return call(layer, *args, **named)

            return self._single_node(NodeCall(layer, called, args, named, (*self._scopes, scope)))
        self._scopes.append(scope)
        self._opened.append(layer)
        self.enter_layer(layer)
        output = call(layer, *args, **named)
        self.leave_layer(output)
        self._scopes.pop()
        self._opened.pop()
        return output

    def read(self, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Reads a tensor's numbers; a read by a check becomes a node that repeats the check."""
        value = function(*args, **named)
        if not self._inside and args[0].dtype == paddle.bool and (only_raises() or only_checked()):
            check = (args[0], bool(np.all(value)), user_place())
            self._single_node(NodeCall(require_same, require_same, check, {}, tuple(self._scopes)))
        return value

    def shape(self, tensor: Tensor, shape: list[int]) -> list[Any]:
        """See :class:`fleetpipe.paddle_api.eager_operations.OperationListener`."""
        return shape

    def backward(self, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """See :class:`fleetpipe.paddle_api.eager_operations.OperationListener`."""
        return function(*args, **named)

    def recompute(self, call: Function, function: Function, args: tuple[Any, ...]) -> Any:
        """Calls the function; the pipeline has its own options for recompute."""
        return call() if self._inside else function(*args)

    def memory(self, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """See :class:`fleetpipe.paddle_api.eager_operations.OperationListener`."""
        return function(*args, **named)

    def assigned(self, put: Function, layer: Layer, name: str, value: Any) -> None:
        """See :class:`fleetpipe.paddle_api.eager_operations.OperationListener`."""
        before = buffers_in(layer).get(name)
        another = isinstance(value, paddle.Tensor) and value is not before
        if self._inside or id(layer) not in self._paths or before is None or not another:
            put(layer, name, value)
            return

        def set_buffer(*_: Tensor) -> None:
            put(layer, name, value)

        # In a stage the buffer stays the same object, and gets the memory of the other tensor.
        buffer = self._replaced.setdefault((id(layer), name), before)
        self._single_node(NodeCall(set_data, set_buffer, (buffer, value), {}, tuple(self._scopes)))

    def _single_node(self, call: NodeCall) -> Any:
        """Runs a node, within which no nodes are found."""
        self._inside = True
        try:
            return self.node(call)
        finally:
            self._inside = False
