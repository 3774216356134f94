"""Stores the state of layers and of the process before a call, and restores it for a second call.

:class:`LayerStates` stores the attributes and buffers of layers, and the lists, dicts and sets that
their code writes to. :class:`OwnState` lets a forward and a backward that run in turns each have
their own state of the process, such as replaced forwards and random states.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from operator import is_
from types import FunctionType
from typing import Any, NamedTuple, Protocol

from fleetpipe.aliases import Layer, Tensor
from fleetpipe.dygraph import random_keys
from fleetpipe.dygraph.function_code import closure_values, is_of_library, names_in, variables_of
from fleetpipe.dygraph.gradients import drop_gradients, gradient_of, set_gradient
from fleetpipe.dygraph.nest import leaf_like
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.amp import automatic_casts
from fleetpipe.paddle_api.device import device_kind, device_setter
from fleetpipe.paddle_api.eager_operations import set_data
from fleetpipe.paddle_api.layer import buffers_in, forward_hooks, parameters_in, state_slots
from fleetpipe.paddle_api.tensor import copy_of, tensor_bytes
from fleetpipe.transport.wire import bridge

#: The types of containers whose contents are stored and restored.
CONTAINERS = (list, dict, set, deque)

#: Copies of a buffer with more bytes are shared by calls between which it has not changed.
LARGE = 2**14

#: The names of the attributes that every layer has.
PADDLES_ATTRIBUTES = vars(paddle.nn.Layer()).keys()

#: The last copies of large buffers, by the id of the dict that holds the buffer and its name there.
Copies = MutableMapping[tuple[int, str], Tensor]

#: The changes that apply now, in the order in which they began; whoever begins one adds it here.
changes: list[Change] = []


def content_of(container: Any) -> Any:
    """Returns a shallow copy of a container, for :func:`refill`; ``()`` for an empty one."""
    return container.copy() if container else ()


def refill(container: Any, content: Any) -> None:
    """Gives a container, in place, the content that :func:`content_of` returned, if it differs."""
    same = len(container) == len(content) and all(map(is_, container, content))
    if same and isinstance(container, dict) and content:
        same = all(map(is_, container.values(), content.values()))
    # Unchanged containers are not touched: other code may be iterating over them.
    if not same:
        container.clear()
        (container.extend if isinstance(container, (list, deque)) else container.update)(content)


def reachable_containers(layers: Collection[Layer], functions: Iterable[object]) -> Iterator[Any]:
    """Yields the containers, and the attribute dicts of objects, that a forward may write to.

    They are the module variables, values of closures and attributes that are named in the code of
    forwards, of hooks and of ``functions``, or in the methods and functions that this code calls,
    but not in any that those call: a search of all reachable code would not end.

    Args:
        layers: The layers whose forwards and hooks are read.
        functions: More functions to read; other objects are ignored.
    """
    classes = {type(layer) for layer in layers if not is_of_library(type(layer))}
    hooks = (hook for layer in layers for table in forward_hooks(layer) for hook in table.values())
    code = list(
        filter(_is_user_function, (*functions, *hooks, *(kind.forward for kind in classes)))
    )
    helpers = [value for function in code for value in variables_of(function).values()]
    helpers += [vars(kind).get(name) for kind in classes for name in _names_in_functions(code)]
    code += filter(_is_user_function, helpers)
    names = _names_in_functions(code)
    values: list[Any] = []
    for function in code:
        values += (*variables_of(function).values(), *closure_values(function))
    for layer in layers:
        attributes = vars(layer)
        values += [attributes[name] for name in names & attributes.keys()]
    for value in {id(value): value for value in values}.values():
        yield from _containers_in(value, names)


def _containers_in(value: Any, names: frozenset[str]) -> Iterator[Any]:
    """Yields a value that is a container, or the containers in the attributes of a user's object.

    Args:
        value: A container, an object or a class.
        names: The names of the attributes to look at.
    """
    if isinstance(value, CONTAINERS):
        yield value
        return
    kind = value if isinstance(value, type) else type(value)
    if is_of_library(kind) or isinstance(value, paddle.nn.Layer):
        return
    tables = [vars(kind)]
    if kind is not value and hasattr(value, "__dict__"):
        yield vars(value)
        tables.append(vars(value))
    attributes = (table[name] for table in tables for name in names & table.keys())
    yield from (attribute for attribute in attributes if isinstance(attribute, CONTAINERS))


def _names_in_functions(functions: Iterable[FunctionType]) -> frozenset[str]:
    """Returns the names in the code of functions."""
    return frozenset[str]().union(*(names_in(function.__code__) for function in functions))


def _is_user_function(function: object) -> bool:
    """Whether an object is a Python function that no library has defined."""
    return isinstance(function, FunctionType) and not is_of_library(function)


class _SavedBuffer(NamedTuple):
    """A copy of a buffer, or of a statistic among the parameters, of a layer.

    Attributes:
        table: The layer's dict that holds the buffer.
        name: The name of the buffer in the dict.
        copy: A tensor with the values that the buffer had.
    """

    table: dict[str, Any]
    name: str
    copy: Tensor


class LayerStates:
    """The attributes, buffers and statistics of layers at one moment.

    The content of lists, dicts and sets among the attributes is restored, not that of nested ones.
    """

    def __init__(self, layers: Collection[Layer], copies: Copies) -> None:
        """Stores the current state.

        Args:
            layers: The layers.
            copies: Buffer copies of earlier calls, to share; new ones are added.
        """
        self._layers = layers
        #: The dicts of attributes, parameters and buffers, each with a copy.
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
        #: The containers among the attributes, each with its content.
        self._contents: list[tuple[Any, Any]] = []
        self._buffers: list[_SavedBuffer] = []
        for layer in layers:
            tables = layer.__dict__, parameters_in(layer), buffers_in(layer)
            attributes, parameters, buffers = (table.copy() for table in tables)
            # A schedule replaces the forward in each action.
            attributes.pop("forward", None)
            users = (attributes[name] for name in attributes.keys() - PADDLES_ATTRIBUTES)
            for value in (*forward_hooks(layer), *users):
                if isinstance(value, CONTAINERS):
                    self._contents.append((value, content_of(value)))
            stored = {name: value for name, value in buffers.items() if not _is_computed(value)}
            self._tables += zip(tables, (attributes, parameters, stored))
            for table, name in state_slots(layer):
                if not _is_computed(table[name]):
                    self._buffers.append(
                        _SavedBuffer(table, name, _copy_buffer(table, name, copies))
                    )

    @contextmanager
    def put_back(self, functions: Iterable[object]) -> Iterator[None]:
        """A context in which the layers have the stored state, with copies of their buffers.

        At the end they have again the state that they had when it was opened, also in the
        containers that the layers or ``functions`` may write to.
        """
        current = [table.copy() for table, _ in self._tables]
        containers = (
            *(container for container, _ in self._contents),
            *reachable_containers(self._layers, functions),
        )
        contents = [(container, content_of(container)) for container in containers]
        try:
            for container, content in self._contents:
                refill(container, content)
            for table, stored in self._tables:
                for name in table.keys() - stored.keys():
                    if name != "forward" and not _is_computed(table[name]):
                        del table[name]
                table.update(stored)
            for buffer in self._buffers:
                buffer.table[buffer.name] = leaf_like(buffer.copy, copied=True)
            yield
        finally:
            for (table, _), values in zip(self._tables, current):
                table.clear()
                table.update(values)
            for container, content in contents:
                refill(container, content)


@contextmanager
def model_kept(
    layers: Collection[Layer], parameters: Collection[Tensor], functions: Iterable[object] = ()
) -> Iterator[None]:
    """A context that restores gradients and the state of layers, but not weights, at its end.

    Args:
        layers: The layers, sublayers included.
        parameters: The parameters whose gradients are restored.
        functions: More functions that run, which may write to containers.
    """
    gradients = [(p, copy_of(g)) for p in parameters if (g := gradient_of(p)) is not None]
    try:
        with LayerStates(layers, {}).put_back(functions):
            yield
    finally:
        drop_gradients(parameters)
        for parameter, gradient in gradients:
            set_gradient(parameter, gradient)


@paddle.no_grad()
def buffers_kept(layers: Iterable[Layer]) -> Callable[[], None]:
    """Copies the buffers and statistics of layers; returns a function that restores them."""
    sublayers = (part for layer in layers for part in layer.sublayers(include_self=True))
    buffers = [
        (_SavedBuffer(table, name, copy_of(table[name])), table[name])
        for sublayer in sublayers
        for table, name in state_slots(sublayer)
        if not _is_computed(table[name])
    ]

    def put_back() -> None:
        for buffer, tensor in buffers:
            set_data(tensor, buffer.copy)
            buffer.table[buffer.name] = tensor

    return put_back


def _copy_buffer(table: dict[str, Any], name: str, copies: Copies) -> Tensor:
    """Returns a copy of the buffer ``table[name]``; one of ``copies`` if that has the same bits."""
    tensor, key = table[name], (id(table), name)
    # On a GPU each comparison would make the host wait.
    copy = copies.get(key) if device_kind() == "cpu" else None
    if (
        copy is None
        or copy.stop_gradient != tensor.stop_gradient
        or not bridge.same_bits(copy, tensor)
    ):
        copy = leaf_like(tensor, copied=True)
        if tensor_bytes(tensor) > LARGE:
            copies[key] = copy
    return copy


def _is_computed(value: object) -> bool:
    """Whether a value is a tensor with a gradient, such as a weight that ``weight_norm`` makes."""
    return isinstance(value, paddle.Tensor) and not value.stop_gradient


class Change(Protocol):
    """A temporary change of state that the whole process shares, such as a replaced forward."""

    def begin(self) -> None:
        """Makes the change."""

    def end(self) -> None:
        """Undoes the change; :meth:`begin` may be called again."""


class OwnState:
    """The state of one of two computations that run in turns; see :mod:`fleetpipe.mesh.turns`.

    It consists of the current changes and the random states. Automatic casts, the device and the
    gradient switch are not in it, because Paddle has them for each thread.
    """

    def suspend(self) -> Callable[[], None]:
        """Undoes all changes, the last one first; returns a function that makes them again.

        The function also restores the current random states.
        """
        suspended, resume_random = changes[:], random_keys.suspend_random_states()
        changes.clear()
        for change in reversed(suspended):
            change.end()

        def resume() -> None:
            for change in suspended:
                change.begin()
                changes.append(change)
            resume_random()

        return resume

    def inherited(self) -> AbstractContextManager[None]:
        """Returns a context that gives another thread this thread's casts, device and switch."""
        return _with_settings(automatic_casts(), device_setter(), paddle.is_grad_enabled())


@contextmanager
def _with_settings(
    casts: Callable[[], AbstractContextManager[object]],
    use_device: Callable[[], None],
    gradients: bool,
) -> Iterator[None]:
    """A context in which this thread has the given casts, device and gradient switch."""
    use_device()
    with casts(), paddle.set_grad_enabled(gradients):
        yield
