"""Finds the values that a forward depends on beside inputs, modes and tensors' values.

A script may change them on the model between two batches: numbers and functions in attributes,
entries of lists, dicts and configurations, sublayers, hooks, variables that the code reads.
"""

from __future__ import annotations

import argparse
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from fleetpipe.aliases import Layer
from fleetpipe.dygraph.code_names import held_by, is_of_library, variables_of
from fleetpipe.errors import CaptureError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import buffers_in, parameters_in, sublayers_in
from fleetpipe.paddle_api.tensor import is_parameter

#: By what it is called, what stands for a thing and is equal for as long as the thing is the same.
Marks = Mapping[str, object]

_NUMBERS = (bool, int, float, complex, str, bytes, type(None), np.generic)
#: Other objects of libraries count by identity: what they keep says nothing of a forward.
_CONFIGURATIONS = (argparse.Namespace, SimpleNamespace)
#: What a partial, a method and a property have.
_WITHIN = ("func", "args", "keywords", "__func__", "__self__", "fget")
#: Items of a container, or bytes of an array, beyond which only the thing itself counts.
_MOST = 2**16


class Same:
    """A reference to an object, equal only to references to the same object."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        """Takes the object, and keeps it alive."""
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def attributes_of(model: Layer, opens: Callable[[str, Layer], bool]) -> Marks:
    """Returns marks of the values on which the forwards of opened layers depend.

    Args:
        model: The model, which is opened.
        opens: Whether a layer is opened, by its path; others are single nodes, and are left out.
    """
    marks: dict[str, object] = {}
    visited: dict[int, object] = {}
    for path, layer in _layers_in("", model):
        if layer is not model and not opens(path, layer):
            continue
        for name, value in vars(layer).items():
            if name in ("_parameters", "_buffers"):
                # Stages take them by name, whichever there are.
                marks[_join_path(path, name)] = tuple(
                    (key, None if tensor is None else (tuple(tensor.shape), tensor.dtype))
                    for key, tensor in value.items()
                )
            elif name != "training":
                marks[_join_path(path, name)] = _mark(value, visited)
        for kind in type(layer).__mro__:
            name = f"class {kind.__qualname__}"
            if name not in marks and not is_of_library(kind):
                marks[name] = _mark(vars(kind), visited)
    return marks


def tensors_of(model: Layer) -> dict[str, Same]:
    """Returns a reference to each parameter and buffer, by name."""
    return {
        _join_path(path, name): Same(tensor)
        for path, layer in _layers_in("", model)
        for name, tensor in chain(parameters_in(layer).items(), buffers_in(layer).items())
        if tensor is not None
    }


def difference(before: Marks, now: Marks) -> str:
    """Returns the first name whose mark has changed."""
    return next(name for name in {**now, **before} if before.get(name) != now.get(name))


def require_same_parameters(before: Mapping[str, Same], now: Mapping[str, Same]) -> None:
    """Refuses a model whose parameters are other objects; buffers may be others."""
    for name in {**before, **now} if before != now else ():
        tensor: Any = (now.get(name) or before[name]).value
        if before.get(name) != now.get(name) and is_parameter(tensor):
            cause = "it is another parameter, which no stage and no optimizer has"
            raise unfitting(name, cause if name in now else "it is there no more")


def unfitting(name: str, cause: str) -> CaptureError:
    """Returns the error for a change of the plain model that does not fit the stages."""
    return CaptureError(
        f"{name!r} has changed on the model, and does not fit the stages that were made of it",
        where=name,
        cause=cause,
        fix="change it before fleetpipe.pipeline is called; or go on with a new model: load "
        "pipe.full_state_dict() into it, then change it, and make its pipeline and its optimizer",
    )


def _layers_in(path: str, layer: Layer) -> Iterator[tuple[str, Layer]]:
    yield path, layer
    for name, sublayer in sublayers_in(layer).items():
        if sublayer is not None:
            yield from _layers_in(_join_path(path, name), sublayer)


def _join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _mark(value: Any, visited: dict[int, object]) -> object:
    """Returns a mark that is equal as long as a value, with all that it contains, is unchanged."""
    if isinstance(value, _NUMBERS):
        return type(value), value if value == value else "nan"
    if isinstance(value, paddle.Tensor):
        return Same(value), value.inplace_version
    if id(value) in visited:
        return None
    visited[id(value)] = value
    if isinstance(value, np.ndarray) and value.dtype != object and value.nbytes <= _MOST:
        return value.shape, value.dtype, value.tobytes()
    if isinstance(value, (Mapping, list, tuple, set, frozenset, deque)):
        if len(value) > _MOST:
            return Same(value), len(value)
        items = value.items() if isinstance(value, Mapping) else value
        marks = tuple(_mark(item, visited) for item in items)
        return type(value), frozenset(marks) if isinstance(value, (set, frozenset)) else marks
    return Same(value), tuple(_mark(part, visited) for part in _parts_of(value))


def _parts_of(value: Any) -> Iterator[object]:
    """Yields the parts of a user's object or function on which its behaviour depends."""
    if isinstance(value, (functools.partial, MethodType, property, staticmethod, classmethod)):
        yield from (getattr(value, name, None) for name in _WITHIN)
    elif isinstance(value, (ModuleType, type, paddle.nn.Layer)) or (
        is_of_library(value) and not isinstance(value, _CONFIGURATIONS)
    ):
        return
    elif isinstance(value, FunctionType):
        yield from (*held_by(value), *variables_of(value).values())
    else:
        yield from (getattr(value, name, None) for name in getattr(value, "__slots__", ()))
        yield getattr(value, "__dict__", None)
