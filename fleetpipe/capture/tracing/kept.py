"""Puts a model back to what it was before a run of its forward."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from fleetpipe.aliases import Layer, Tensor
from fleetpipe.capture.running.memory import release
from fleetpipe.capture.tracing._paddle import renew, set_data
from fleetpipe.capture.tracing.python_state import python_state_kept
from fleetpipe.dygraph import has_memory
from fleetpipe.dygraph.random_keys import random_states_kept

#: What an attribute may be filled with, while it stays the same object.
_CONTAINERS = (list, dict, set, deque)

#: Where a layer has what it has; a tensor that is set leaves the attributes and comes here.
_HOLDERS = ("_parameters", "_buffers", "_sub_layers")

#: The models whose attributes are put back later.
_waiting: set[int] = set()


class _Kept(NamedTuple):
    """A parameter or buffer, and what has its memory; None where it has none."""

    tensor: Tensor
    memory: Tensor | None
    trained: bool


@contextmanager
def attributes_running_on(model: Layer) -> Iterator[None]:
    """Within it runs of a forward begin with the attributes that the ones before have left."""
    _waiting.add(id(model))
    try:
        with python_state_kept(model):
            yield
    finally:
        _waiting.remove(id(model))


@contextmanager
def state_kept(model: Layer) -> Iterator[set[int]]:
    """Puts the state of a model back in the end, and tells the ids of the tensors that changed.

    That is its parameters and buffers, random states, and what its layers have as attributes.
    Within it parameters and buffers are copies: a graph from before may need what they were.
    """
    changed: set[int] = set()
    layers = model.sublayers(include_self=True)
    attributes = [(vars(layer), dict(vars(layer))) for layer in layers]
    places = [
        (holder, dict(holder)) for layer in layers for holder in (layer._parameters, layer._buffers)
    ]
    tensors = {id(t): _kept(t) for _, held in places for t in held.values() if t is not None}
    holders = [_contents({kind: vars(layer)[kind] for kind in _HOLDERS}) for layer in layers]
    attributes_of_run = nullcontext() if id(model) in _waiting else python_state_kept(model)
    with random_states_kept(), attributes_of_run:
        try:
            yield changed
        finally:
            for holder, held in places:
                changed.update(id(t) for name, t in held.items() if holder.get(name) is not t)
            for contents, (now, before) in zip(holders, attributes):
                _fill(contents)
                # It was None, and its place was taken by a tensor.
                now.update((name, before[name]) for name in before.keys() - now.keys())
            changed.update(key for key, kept in tensors.items() if _restored(kept))


def _contents(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns attributes, each with a copy of what it contains."""
    return {
        name: (value, value.copy() if isinstance(value, _CONTAINERS) else None)
        for name, value in attributes.items()
    }


def _fill(contents: dict[str, tuple[Any, Any]]) -> None:
    """Gives containers what they contained."""
    for value, content in contents.values():
        if content is None or (len(content) == len(value) and _same_items(content, value)):
            continue
        value.clear()
        value.extend(content) if isinstance(value, (list, deque)) else value.update(content)


def _same_items(one: Any, other: Any) -> bool:
    """Whether containers hold the same objects in the same order."""
    if isinstance(one, dict):
        one, other = (*one, *one.values()), (*other, *other.values())
    return all(a is b for a, b in zip(one, other))


def _kept(tensor: Tensor) -> _Kept:
    memory = None
    if has_memory(tensor):
        memory = tensor.detach()
        renew(tensor)
    return _Kept(tensor, memory, not tensor.stop_gradient)


def _bytes(tensor: Tensor) -> Any:
    return np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8)


def _restored(kept: _Kept) -> bool:
    """Puts back what a tensor held; returns whether it was something else."""
    tensor, memory, trained = kept
    if memory is None:
        # Lent to a node, or written into.
        release([tensor])
        return False
    if not tensor.is_leaf:
        # What was written into it needs a gradient.
        tensor.detach_()
    if tensor.stop_gradient is trained:
        tensor.stop_gradient = not trained
    same = (
        has_memory(tensor)
        and tensor.shape == memory.shape
        and tensor.dtype == memory.dtype
        # equal_all of 2.6.2 takes small numbers for zeros.
        and np.array_equal(_bytes(tensor), _bytes(memory))
    )
    set_data(tensor, memory)
    return not same
