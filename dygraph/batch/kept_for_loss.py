"""Refuses tensors that a layer leaves where the loss function reads them, on a rank without it.

Auxiliary losses that layers append to a list of their module, say, and that the loss adds up: where
the loss runs in another process it never sees those of this one, and trains without them.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from fleetpipe.dygraph.nest import has_gradient, outline
from fleetpipe.errors import BoundaryError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import buffers_in, sublayers_in

#: What is named in code of these says nothing of a model.
_LIBRARIES = ("paddle", "fleetpipe", "numpy")

#: What the loss function itself is called.
_LOSS = "loss_fn"

#: A list or dict of more than these is data, or a vocabulary.
_MOST = 1000


def require_nothing_kept(functions: Iterable[Any], stage: int) -> None:
    """Refuses what a stage has kept for a loss that another process computes.

    Args:
        functions: The loss functions.
        stage: The stage whose forward has run.

    Raises:
        BoundaryError: One of them reads a tensor that has a graph here.
    """
    for function in functions:
        if str(getattr(function, "__module__", "")).startswith("paddle."):
            continue
        path, tensor = next(_kept_for(function), ("", None))
        if tensor is not None:
            raise BoundaryError(
                "the loss function reads a tensor that a layer keeps here, and it runs on the rank "
                "of the last stage",
                where=f"stage {stage}",
                expected="a loss of the model's output and the label alone",
                got=f"{path}: {outline(tensor)}, with a gradient",
                cause="a layer appends an auxiliary loss to a list, or keeps it in an attribute",
                fix="return the tensor with the output, (output, kept), and have the layers behind "
                "hand it on to the loss, as the second entry of its first argument",
            )


def _kept_for(function: Any) -> Iterator[tuple[str, Any]]:
    """Yields the tensors with a graph that the code of a function can reach, and their paths."""
    names: set[str] = set()
    count, reached = -1, list(_reached(function, names))
    # By a name that code has an attribute is followed, which may be code with other names.
    while names and count < len(names):
        count, reached = len(names), list(_reached(function, names))
    for path, value in reached:
        if isinstance(value, paddle.Tensor) and has_gradient(value) and not value.is_leaf:
            yield path, value


def _reached(function: Any, names: set[str]) -> Iterator[tuple[str, Any]]:
    """Yields what a function can reach; adds to ``names`` those in the code of functions."""
    seen: set[int] = set()
    waiting = [(_LOSS, function)]
    while waiting:
        path, value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield path, value
        waiting += _parts(path, value, names)


def _parts(path: str, value: Any, names: set[str]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple, set, deque, dict)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        yield from ((f"{path}[{key!r}]", item) for key, item in items if len(value) <= _MOST)
    elif isinstance(value, functools.partial):
        yield from ((path, part) for part in (value.func, value.args, value.keywords))
    elif isinstance(value, MethodType):
        yield from ((path, part) for part in (value.__func__, value.__self__))
    elif isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        yield path, (cells, value.__defaults__, value.__kwdefaults__)
        if not _is_of_library(value.__globals__.get("__name__")):
            of_code = set(_names_in(value.__code__))
            names |= of_code
            yield from (
                (name, value.__globals__[name]) for name in of_code & value.__globals__.keys()
            )
    elif isinstance(value, ModuleType):
        if not _is_of_library(value.__name__):
            yield from (
                (f"{path}.{name}", vars(value)[name]) for name in names & vars(value).keys()
            )
    elif hasattr(value, "__dict__") and not isinstance(value, (type, paddle.Tensor)):
        layer = isinstance(value, paddle.nn.Layer)
        # What a model of which it uses the weights has for itself is no part of the loss.
        called = path == _LOSS or not (layer and value.parameters())
        methods = {"__call__", "forward", *names} if called else names
        functions = (getattr(type(value), name, None) for name in methods)
        yield from ((path, method) for method in functions if isinstance(method, FunctionType))
        if path == _LOSS and _is_of_library(type(value).__module__):
            # The user's loss is within.
            inner = [*vars(value).values(), *(sublayers_in(value).values() if layer else ())]
            yield from ((path, part) for part in inner if callable(part))
        for place, part in value.named_sublayers(path, True) if layer else [(path, value)]:
            tables = (vars(part), buffers_in(part)) if layer else (vars(part),)
            for table in tables:
                yield from ((f"{place}.{name}", table[name]) for name in names & table.keys())
        if layer:
            parts = sublayers_in(value)
            yield from ((f"{path}.{name}", parts[name]) for name in names & parts.keys())


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _is_of_library(module: object) -> bool:
    return str(module).partition(".")[0] in _LIBRARIES


def _names_in(code: CodeType) -> Iterator[str]:
    """Yields the names of globals and attributes in code, and the words by which it may ask."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _names_in(constant)
