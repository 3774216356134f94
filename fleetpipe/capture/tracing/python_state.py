"""What layers keep on Python's side: their attributes, what containers in these hold, generators.

A run of a forward for a capture or a proof is not to be seen in it afterwards: a counter that
begins at the number of trial runs would train otherwise than the plain model's.
"""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from fleetpipe._paddle import paddle
from fleetpipe.aliases import Layer
from fleetpipe.dygraph import has_memory
from fleetpipe.dygraph._paddle import is_parameter

#: Puts one thing back.
_Restore = Callable[[], None]


@contextmanager
def python_state_kept(model: Layer) -> Iterator[None]:
    """Puts back, in the same objects, what a model's layers keep on Python's side.

    Tensors that are neither parameters nor buffers are among it; objects of other classes are not
    looked into.
    """
    restores: list[_Restore] = []
    visited: set[int] = set()
    for layer in model.sublayers(include_self=True):
        _keep(vars(layer), restores, visited)
    try:
        yield
    finally:
        for restore in restores:
            restore()


def _keep(value: Any, restores: list[_Restore], visited: set[int]) -> None:
    """Notes how to put back what is in ``value``, and in what it holds."""
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
        # Parameters are no part of this: they are kept by name.
        if not is_parameter(value) and has_memory(value):
            visited.add(id(value))
            version, numbers = value.inplace_version, value.detach().clone()
            restores.append(lambda: _rewrite(value, version, numbers))
    else:
        restore = _restore_of(value)
        if restore is not None:
            visited.add(id(value))
            restores.append(restore)


def _restore_of(value: Any) -> _Restore | None:
    """Returns what puts a generator or an array back; None for anything else."""
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    if isinstance(value, np.random.RandomState):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, np.ndarray) and value.dtype != object and value.flags.writeable:
        return functools.partial(np.copyto, value, value.copy())
    return None


def _rewrite(tensor: Any, version: int, numbers: Any) -> None:
    if tensor.inplace_version != version:
        tensor.set_value(numbers)


def _refill(container: Any, content: Any) -> None:
    """Gives a container the content that it had; one that has it stays untouched."""
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
