"""Splits a run of a model's forward into nodes.

Layers without sublayers, and Paddle's own, are nodes; other layers are opened: the calls in their
forward are the nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.capture.tracing.place import only_checked, only_raises, user_place
from fleetpipe.capture.tracing.value import Scope
from fleetpipe.errors import CaptureError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import buffers_in, has_hooks, sublayers_in
from fleetpipe.paddle_api.operations import SHARED_BY_RECOMPUTE, Function, set_data

#: Layers of Paddle's that call others, and are opened nevertheless.
_OPENED = (
    *("Sequential", "Transformer", "TransformerEncoder", "TransformerDecoder"),
    *("LayerList", "LayerDict"),
)


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
        """Number of additions: after a change, an earlier capture may be outdated."""
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
        """Whether a layer is opened; decided once, whatever hooks a copy of it gets."""
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
    """Refuses a batch in which a check of the forward's has another outcome than at the capture."""
    if bool(tensor) != expected:
        raise CaptureError(
            "a batch does not pass a check of the model's own forward",
            where=place,
            cause="the plain model raises an error for it there",
            fix="call the plain model with this batch to see which, and mend the data",
        )


class Walk:
    """Finds the nodes of a run: a listener of :mod:`fleetpipe.paddle_api.operations`."""

    def __init__(self, model: Layer, unopened: Unopened) -> None:
        self._model = model
        self._unopened = unopened
        self._paths = {id(part): path for path, part in model.named_sublayers(include_self=True)}
        self._calls: Counter[str] = Counter()
        self._scopes: list[Scope] = []
        self._opened: list[Layer] = []
        self._inside = False
        #: The buffers in whose place the run has put other tensors.
        self._replaced: dict[tuple[int, str], Tensor] = {}

    def node(self, call: NodeCall) -> Any:
        """Runs the call of a node without listening to what happens inside."""
        return call.do()

    def enter_layer(self, layer: Layer) -> None:
        """Called before an opened layer's forward."""

    def leave_layer(self, output: Nest) -> None:
        """Called with the outputs of an opened layer."""

    def operation(self, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """See :class:`fleetpipe.paddle_api.operations.OperationListener`."""
        if self._inside:
            return function(*args, **named)
        if function.__name__ == SHARED_BY_RECOMPUTE:
            # Made by recompute, which is left out; a gradient would not find its way through it.
            return args[0]
        return self._single_node(NodeCall(function, function, args, named, tuple(self._scopes)))

    def layer(self, call: Function, layer: Layer, args: tuple[Any, ...], named: Any) -> Any:
        """See :class:`fleetpipe.paddle_api.operations.OperationListener`."""
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
        """Makes a node of a check, which raises an error in a batch that does not pass it."""
        value = function(*args, **named)
        if not self._inside and args[0].dtype == paddle.bool and (only_raises() or only_checked()):
            check = (args[0], bool(np.all(value)), user_place())
            self._single_node(NodeCall(require_same, require_same, check, {}, tuple(self._scopes)))
        return value

    def shape(self, tensor: Tensor, shape: list[int]) -> list[Any]:
        """See :class:`fleetpipe.paddle_api.operations.OperationListener`."""
        return shape

    def backward(self, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """See :class:`fleetpipe.paddle_api.operations.OperationListener`."""
        return function(*args, **named)

    def recompute(self, call: Function, function: Function, args: tuple[Any, ...]) -> Any:
        """Calls the function; the pipeline has its own options for recompute."""
        return call() if self._inside else function(*args)

    def memory(self, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """See :class:`fleetpipe.paddle_api.operations.OperationListener`."""
        return function(*args, **named)

    def assigned(self, put: Function, layer: Layer, name: str, value: Any) -> None:
        """See :class:`fleetpipe.paddle_api.operations.OperationListener`."""
        before = buffers_in(layer).get(name)
        another = isinstance(value, paddle.Tensor) and value is not before
        if self._inside or id(layer) not in self._paths or before is None or not another:
            put(layer, name, value)
            return

        def set_buffer(*_: Tensor) -> None:
            put(layer, name, value)

        # A stage has the buffer share the memory of the other tensor: it stays where it is.
        buffer = self._replaced.setdefault((id(layer), name), before)
        self._single_node(NodeCall(set_data, set_buffer, (buffer, value), {}, tuple(self._scopes)))

    def _single_node(self, call: NodeCall) -> Any:
        self._inside = True
        try:
            return self.node(call)
        finally:
            self._inside = False
