"""Restores a model to its state before a run of its forward; start with :func:`state_kept`."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from fleetpipe.aliases import Layer, Tensor
from fleetpipe.capture.running.captured_state import release
from fleetpipe.dygraph.random_keys import random_states_kept
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.eager_operations import renew, set_data
from fleetpipe.paddle_api.layer import TABLES, buffers_in, parameters_in
from fleetpipe.paddle_api.tensor import has_memory, is_parameter
from fleetpipe.transport.wire import bridge

#: The ids of the models whose attributes are restored after several runs, not after each.
_waiting: set[int] = set()

#: Restores one object.
_Restore = Callable[[], None]


class _Kept(NamedTuple):
    """A parameter or buffer, and a tensor with its memory; None without memory."""

    tensor: Tensor
    memory: Tensor | None
    trained: bool


@contextmanager
def attributes_running_on(model: Layer) -> Iterator[None]:
    """While it is open, each captured run starts with the attributes that the last one left."""
    _waiting.add(id(model))
    try:
        with python_state_kept(model):
            yield
    finally:
        _waiting.remove(id(model))


@contextmanager
def state_kept(model: Layer) -> Iterator[set[int]]:
    """Restores the state of a model at the end, and yields the ids of the tensors that changed.

    The state is its parameters and buffers, random states, and attributes of layers. Meanwhile
    parameters and buffers are copies, since an earlier graph may need the old ones.
    """
    changed: set[int] = set()
    layers = model.sublayers(include_self=True)
    attributes = [(vars(layer), dict(vars(layer))) for layer in layers]
    places = [
        (holder, dict(holder))
        for layer in layers
        for holder in (parameters_in(layer), buffers_in(layer))
    ]
    tensors = {id(t): _renew(t) for _, held in places for t in held.values() if t is not None}
    holders = _restores((vars(layer)[kind] for layer in layers for kind in TABLES), tensors)
    attributes_of_run = nullcontext() if id(model) in _waiting else python_state_kept(model)
    with random_states_kept(), attributes_of_run:
        try:
            yield changed
        finally:
            for holder, held in places:
                changed.update(id(t) for name, t in held.items() if holder.get(name) is not t)
            regrown = {id(holder) for holder, held in places if _has_other_shape(holder, held)}
            for restore in holders:
                restore()
            for layer, (now, before) in zip(layers, attributes):
                if id(buffers_in(layer)) in regrown:
                    # A longer input makes a table longer, and sets its length in an attribute.
                    now.update(before)
                # Attributes that were None, and that a tensor replaced as a buffer.
                now.update((name, before[name]) for name in before.keys() - now.keys())
            changed.update(key for key, kept in tensors.items() if _restore(kept))


def _has_other_shape(now: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> bool:
    """Whether a tensor of a layer was replaced by one of another shape."""
    pairs = ((now.get(name), tensor) for name, tensor in before.items() if tensor is not None)
    return any(other is not None and other.shape != tensor.shape for other, tensor in pairs)


def _renew(tensor: Tensor) -> _Kept:
    """Moves a tensor to new memory, and returns it with a tensor that has the old memory."""
    memory = None
    if has_memory(tensor):
        memory = tensor.detach()
        renew(tensor)
    return _Kept(tensor, memory, not tensor.stop_gradient)


def _restore(kept: _Kept) -> bool:
    """Restores a tensor, and returns whether it had changed."""
    tensor, memory, trained = kept
    if memory is None:
        # It had no memory, and got some for a node or from a write.
        release([tensor])
        return False
    if not tensor.is_leaf:
        # A value that needs a gradient was written into it.
        tensor.detach_()
    if tensor.stop_gradient is trained:
        tensor.stop_gradient = not trained
    # equal_all of 2.6.2 takes small numbers for zeros.
    same = has_memory(tensor) and bridge.same_bits(tensor, memory)
    set_data(tensor, memory)
    return not same


@contextmanager
def python_state_kept(model: Layer) -> Iterator[None]:
    """Restores, in the same objects, the Python attributes of a model's layers.

    They include tensors that are neither parameters nor buffers; objects of other classes are not
    searched.
    """
    layers = model.sublayers(include_self=True)
    state = (
        t for layer in layers for t in (*parameters_in(layer).values(), *buffers_in(layer).values())
    )
    restores = _restores(map(vars, layers), map(id, state))
    try:
        yield
    finally:
        for restore in restores:
            restore()


@contextmanager
def losses_kept(functions: Iterable[Any]) -> Iterator[None]:
    """Restores the state of loss functions: buffers of layers, attributes of other objects."""
    owners = [getattr(function, "__self__", function) for function in functions]
    layers = [owner for owner in owners if isinstance(owner, paddle.nn.Layer)]
    restores = _restores((getattr(owner, "__dict__", None) for owner in owners), ())
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(state_kept(layer))
        try:
            yield
        finally:
            for restore in restores:
                restore()


def _restores(values: Iterable[Any], visited: Iterable[int]) -> list[_Restore]:
    """Returns functions that restore values and what is in them, except objects with some ids."""
    restores: list[_Restore] = []
    seen = set(visited)
    for value in values:
        _keep(value, restores, seen)
    return restores


def _keep(value: Any, restores: list[_Restore], visited: set[int]) -> None:
    """Adds functions that restore ``value`` and everything in it."""
    if id(value) in visited:
        return
    if isinstance(value, (dict, list, set, deque)):
        visited.add(id(value))
        content = value.copy()
        restores.append(lambda: _refill(value, content))
        for item in content.values() if isinstance(content, dict) else content:
            _keep(item, restores, visited)
    elif isinstance(value, tuple):
        for item in value:
            _keep(item, restores, visited)
    elif isinstance(value, paddle.Tensor):
        # Parameters are restored by state_kept.
        if not is_parameter(value) and has_memory(value):
            visited.add(id(value))
            version, numbers = value.inplace_version, value.detach().clone()

            def rewrite(tensor: Any = value) -> None:
                if tensor.inplace_version != version:
                    tensor.set_value(numbers)

            restores.append(rewrite)
    else:
        restore = _restore_of(value)
        if restore is not None:
            visited.add(id(value))
            restores.append(restore)


def _restore_of(value: Any) -> _Restore | None:
    """Returns a function that restores a generator or an array; None for anything else."""
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    if isinstance(value, np.random.RandomState):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, np.ndarray) and value.dtype != object and value.flags.writeable:
        return functools.partial(np.copyto, value, value.copy())
    return None


def _refill(container: Any, content: Any) -> None:
    """Gives a container its earlier contents, if these have changed."""
    if isinstance(container, dict):
        same = container.keys() == content.keys() and all(
            container[key] is item for key, item in content.items()
        )
    else:
        same = len(container) == len(content) and all(
            one is other for one, other in zip(container, content)
        )
    if not same:
        container.clear()
        (container.update if isinstance(container, (dict, set)) else container.extend)(content)
