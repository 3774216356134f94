"""The state of layers and of the process: stored before a call, and restored for a second call.

:class:`LayerStates` stores the attributes and buffers of layers, and the lists, dicts and sets that
their code writes to. :class:`OwnState` gives a forward and a backward that run in turns separate
process-wide states.
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
from fleetpipe.dygraph.function_code import held_by, is_of_library, names_in, variables_of
from fleetpipe.dygraph.gradients import drop_gradients, gradient_of, set_gradient
from fleetpipe.dygraph.nest import leaf_like
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.amp import automatic_casts
from fleetpipe.paddle_api.device import device_kind, used_here
from fleetpipe.paddle_api.eager_operations import set_data
from fleetpipe.paddle_api.layer import buffers_in, forward_hooks, parameters_in, state_slots
from fleetpipe.paddle_api.tensor import copy_of, tensor_bytes
from fleetpipe.transport.wire import bridge

#: The types of containers whose content is stored.
CONTAINERS = (list, dict, set, deque)

#: Buffers with more bytes share one copy, if their numbers are equal.
LARGE = 2**14

#: The attributes that every layer has.
PADDLES_ATTRIBUTES = vars(paddle.nn.Layer()).keys()

#: Copies of large buffers, by the id of a layer's dict and the name in it.
Copies = MutableMapping[tuple[int, str], Tensor]

#: The changes that apply now, in the order in which they began; each change adds itself.
changes: list[Change] = []


def content_of(container: Any) -> Any:
    """Returns a copy of a container's content, for :func:`refill`."""
    return container.copy() if container else ()


def refill(container: Any, content: Any) -> None:
    """Replaces a container's content, in place, if it has changed."""
    same = len(container) == len(content) and all(map(is_, container, content))
    if same and isinstance(container, dict) and content:
        same = all(map(is_, container.values(), content.values()))
    # Unchanged containers are not touched: other code may be iterating over them.
    if not same:
        container.clear()
        (container.extend if isinstance(container, (list, deque)) else container.update)(content)


def reachable_containers(layers: Collection[Layer], functions: Iterable[object]) -> Iterator[Any]:
    """Yields the containers, and the attribute dicts of objects, that a forward may write to.

    The code of forwards, hooks and functions names them: as module variables, values of closures or
    attributes. The code of methods and functions that this code calls is read too, but no further
    code: a search of all reachable code would not end.
    """
    classes = {type(layer) for layer in layers if not is_of_library(type(layer))}
    hooks = (hook for layer in layers for table in forward_hooks(layer) for hook in table.values())
    code = list(filter(_is_of_user, (*functions, *hooks, *(one.forward for one in classes))))
    helpers = [value for function in code for value in variables_of(function).values()]
    helpers += [vars(one).get(name) for one in classes for name in _names(code)]
    code += filter(_is_of_user, helpers)
    names = _names(code)
    values: list[Any] = []
    for function in code:
        values += (*variables_of(function).values(), *held_by(function))
    for layer in layers:
        attributes = vars(layer)
        values += [attributes[name] for name in names & attributes.keys()]
    for value in {id(value): value for value in values}.values():
        yield from _in(value, names)


def _in(value: Any, names: frozenset[str]) -> Iterator[Any]:
    """Yields a container itself, or the containers in a user's object or class.

    Args:
        value: A value that code names.
        names: The names in the code.
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
    parts = (table[name] for table in tables for name in names & table.keys())
    yield from (part for part in parts if isinstance(part, CONTAINERS))


def _names(code: Iterable[FunctionType]) -> frozenset[str]:
    return frozenset[str]().union(*(names_in(function.__code__) for function in code))


def _is_of_user(function: object) -> bool:
    return isinstance(function, FunctionType) and not is_of_library(function)


class _Slot(NamedTuple):
    """A copy of a buffer, or of a statistic among the parameters, and its place in a layer."""

    table: dict[str, Any]
    name: str
    copy: Tensor


class LayerStates:
    """The attributes, buffers and statistics of layers at one moment.

    The content of lists, dicts and sets among the attributes is restored, but not of nested ones.
    """

    def __init__(self, layers: Collection[Layer], copies: Copies) -> None:
        """Stores the current state.

        Args:
            layers: The layers.
            copies: Buffer copies of earlier calls, to share; new ones are added.
        """
        self._layers = layers
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._contents: list[tuple[Any, Any]] = []
        self._slots: list[_Slot] = []
        for layer in layers:
            tables = layer.__dict__, parameters_in(layer), buffers_in(layer)
            attributes, parameters, buffers = (table.copy() for table in tables)
            # A schedule replaces the forward in each action.
            attributes.pop("forward", None)
            of_user = (attributes[name] for name in attributes.keys() - PADDLES_ATTRIBUTES)
            for value in (*forward_hooks(layer), *of_user):
                if isinstance(value, CONTAINERS):
                    self._contents.append((value, content_of(value)))
            stored = {name: value for name, value in buffers.items() if not _is_computed(value)}
            self._tables += zip(tables, (attributes, parameters, stored))
            for table, name in state_slots(layer):
                if not _is_computed(table[name]):
                    self._slots.append(_Slot(table, name, _copy(table, name, copies)))

    @contextmanager
    def put_back(self, functions: Iterable[object]) -> Iterator[None]:
        """While it is open, the layers have the stored state, with copies of their buffers.

        At the end the state from before is restored, also in the containers that the layers or
        ``functions`` may write to.
        """
        now = [table.copy() for table, _ in self._tables]
        containers = (
            *(container for container, _ in self._contents),
            *reachable_containers(self._layers, functions),
        )
        contents = [(container, content_of(container)) for container in containers]
        try:
            for container, content in self._contents:
                refill(container, content)
            for table, then in self._tables:
                for name in table.keys() - then.keys():
                    if name != "forward" and not _is_computed(table[name]):
                        del table[name]
                table.update(then)
            for slot in self._slots:
                slot.table[slot.name] = leaf_like(slot.copy, copied=True)
            yield
        finally:
            for (table, _), values in zip(self._tables, now):
                table.clear()
                table.update(values)
            for container, content in contents:
                refill(container, content)


@contextmanager
def model_kept(
    layers: Collection[Layer], parameters: Collection[Tensor], functions: Iterable[object] = ()
) -> Iterator[None]:
    """At its end, restores gradients and the state of layers, but not their weights."""
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
    parts = (part for layer in layers for part in layer.sublayers(include_self=True))
    slots = [
        (_Slot(table, name, copy_of(table[name])), table[name])
        for part in parts
        for table, name in state_slots(part)
        if not _is_computed(table[name])
    ]

    def put_back() -> None:
        for slot, tensor in slots:
            set_data(tensor, slot.copy)
            slot.table[slot.name] = tensor

    return put_back


def _copy(table: dict[str, Any], name: str, copies: Copies) -> Tensor:
    """Returns a copy of a buffer; an earlier copy if it has the same bits."""
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
    """Whether a value is a computed tensor, such as the weight of ``weight_norm``."""
    return isinstance(value, paddle.Tensor) and not value.stop_gradient


class Change(Protocol):
    """A temporary change of process-wide state."""

    def begin(self) -> None:
        """Changes the state of the process."""

    def end(self) -> None:
        """Restores the state of the process; :meth:`begin` may be called again."""


class OwnState:
    """Suspends and resumes changes and random states; see :mod:`fleetpipe.mesh.turns`.

    Paddle keeps automatic casts, the device and the gradient switch per thread.
    """

    def suspend(self) -> Callable[[], None]:
        """Undoes all changes, the last one first; returns a function that makes them again."""
        made, states = changes[:], random_keys.suspend()
        changes.clear()
        for change in reversed(made):
            change.end()

        def resume() -> None:
            for change in made:
                change.begin()
                changes.append(change)
            states()

        return resume

    def inherited(self) -> AbstractContextManager[None]:
        """Returns a context that gives another thread this thread's casts, device and switch."""
        return _with_settings(automatic_casts(), used_here(), paddle.is_grad_enabled())


@contextmanager
def _with_settings(
    casts: Callable[[], AbstractContextManager[object]],
    use_device: Callable[[], None],
    gradients: bool,
) -> Iterator[None]:
    use_device()
    with casts(), paddle.set_grad_enabled(gradients):
        yield
