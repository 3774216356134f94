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
from fleetpipe.paddle_api.eager_operations import move_to_new_memory, set_data
from fleetpipe.paddle_api.layer import TABLES, buffers_in, parameters_in
from fleetpipe.paddle_api.tensor import has_memory, is_parameter
from fleetpipe.transport.wire import bridge

#: The ids of the models whose attributes are restored after several runs, not after each.
_restored_later: set[int] = set()

#: A function that restores one object.
_Restore = Callable[[], None]


class _SavedTensor(NamedTuple):
    """A parameter or buffer, with its memory and settings before a run.

    Attributes:
        tensor: The parameter or buffer.
        memory: A tensor with its memory from before; None if it had none.
        trained: Whether it needed a gradient.
    """

    tensor: Tensor
    memory: Tensor | None
    trained: bool


@contextmanager
def attributes_kept_between_runs(model: Layer) -> Iterator[None]:
    """Lets each run start with the attributes that the last run left, and restores them at the end.

    The attributes are the Python attributes of the model's layers; the runs are those within
    :func:`state_kept` while this context is open.
    """
    _restored_later.add(id(model))
    try:
        with python_state_kept(model):
            yield
    finally:
        _restored_later.remove(id(model))


@contextmanager
def state_kept(model: Layer) -> Iterator[set[int]]:
    """Restores the state of a model when the context ends.

    The state is the model's parameters and buffers, the random states, and the attributes of its
    layers. Meanwhile parameters and buffers have copies of their memory, since the graph of an
    earlier run may need the old one.

    Yields:
        A set, which has the ids of the tensors that changed once the context has ended.
    """
    changed: set[int] = set()
    layers = model.sublayers(include_self=True)
    attributes = [(vars(layer), dict(vars(layer))) for layer in layers]
    tables = [
        (table, dict(table))
        for layer in layers
        for table in (parameters_in(layer), buffers_in(layer))
    ]
    tensors = (tensor for _, old in tables for tensor in old.values() if tensor is not None)
    saved = {id(tensor): _move_to_new_memory(tensor) for tensor in tensors}
    restores = _restore_functions((vars(layer)[kind] for layer in layers for kind in TABLES), saved)
    restored_later = id(model) in _restored_later
    attributes_of_run = nullcontext() if restored_later else python_state_kept(model)
    with random_states_kept(), attributes_of_run:
        try:
            yield changed
        finally:
            for table, old in tables:
                changed.update(id(t) for name, t in old.items() if table.get(name) is not t)
            reshaped = {id(table) for table, old in tables if _has_other_shape(table, old)}
            for restore in restores:
                restore()
            for layer, (now, before) in zip(layers, attributes):
                if id(buffers_in(layer)) in reshaped:
                    # A longer input makes a table longer, and sets its length in an attribute.
                    now.update(before)
                # Attributes that were None, and that a tensor replaced as a buffer.
                now.update((name, before[name]) for name in before.keys() - now.keys())
            changed.update(key for key, tensor in saved.items() if _restore_tensor(tensor))


def _has_other_shape(now: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> bool:
    """Returns whether a tensor of a layer, by name, was replaced by one of another shape."""
    pairs = ((now.get(name), tensor) for name, tensor in before.items() if tensor is not None)
    return any(new is not None and new.shape != old.shape for new, old in pairs)


def _move_to_new_memory(tensor: Tensor) -> _SavedTensor:
    """Moves a parameter or buffer to new memory, and returns it with its old memory."""
    memory = None
    if has_memory(tensor):
        memory = tensor.detach()
        move_to_new_memory(tensor)
    return _SavedTensor(tensor, memory, not tensor.stop_gradient)


def _restore_tensor(saved: _SavedTensor) -> bool:
    """Restores a parameter or buffer, and returns whether its numbers had changed."""
    tensor, memory, trained = saved
    if memory is None:
        # The tensor had no memory, and got some for a node or from a write.
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
    """Restores the Python attributes of a model's layers, in the same objects, at the end.

    Tensors that are neither parameters nor buffers are restored too. Containers, generators and
    arrays are restored with their contents; objects of other classes are not searched.
    """
    layers = model.sublayers(include_self=True)
    tables = [table for layer in layers for table in (parameters_in(layer), buffers_in(layer))]
    tensor_ids = [id(tensor) for table in tables for tensor in table.values()]
    restores = _restore_functions(map(vars, layers), tensor_ids)
    try:
        yield
    finally:
        for restore in restores:
            restore()


@contextmanager
def losses_kept(functions: Iterable[Any]) -> Iterator[None]:
    """Restores the state of loss functions at the end.

    Of a loss that is a layer this is its whole state, of any other object the attributes.
    """
    owners = [getattr(function, "__self__", function) for function in functions]
    layers = [owner for owner in owners if isinstance(owner, paddle.nn.Layer)]
    restores = _restore_functions((getattr(owner, "__dict__", None) for owner in owners), ())
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(state_kept(layer))
        try:
            yield
        finally:
            for restore in restores:
                restore()


def _restore_functions(values: Iterable[Any], excluded: Iterable[int]) -> list[_Restore]:
    """Returns functions that restore values, and the objects in them, to their state now.

    Objects with the ``excluded`` ids are left out.
    """
    restores: list[_Restore] = []
    visited = set(excluded)
    for value in values:
        _collect_restores(value, restores, visited)
    return restores


def _collect_restores(value: Any, restores: list[_Restore], visited: set[int]) -> None:
    """Adds to ``restores`` functions that restore ``value`` and the objects in it.

    Objects whose ids are in ``visited`` are left out; those that will be restored are added to it.
    """
    if id(value) in visited:
        return
    if isinstance(value, (dict, list, set, deque)):
        visited.add(id(value))
        content = value.copy()
        restores.append(lambda: _refill(value, content))
        for item in content.values() if isinstance(content, dict) else content:
            _collect_restores(item, restores, visited)
    elif isinstance(value, tuple):
        for item in value:
            _collect_restores(item, restores, visited)
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
        restore = _restore_function_of(value)
        if restore is not None:
            visited.add(id(value))
            restores.append(restore)


def _restore_function_of(value: Any) -> _Restore | None:
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
    """Puts ``content``, the earlier items, back into a container if any item was replaced."""
    if isinstance(container, dict):
        same = container.keys() == content.keys() and all(
            container[key] is item for key, item in content.items()
        )
    else:
        same = len(container) == len(content) and all(
            item is earlier for item, earlier in zip(container, content)
        )
    if same:
        return
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(content)
    else:
        container.extend(content)
