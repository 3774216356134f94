"""Refuses tensors that a layer stores for the loss function if that runs on another rank.

An example is a list in a module, to which layers append auxiliary losses and whose sum the loss
adds. If the loss runs in another process, it never sees the list of this process, and the auxiliary
losses are silently not trained.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from fleetpipe.dygraph.code_names import codes_in, held_by, is_of_library, names_in, variables_of
from fleetpipe.dygraph.nest import has_gradient, outline
from fleetpipe.errors import BoundaryError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import buffers_in, sublayers_in

#: What the loss function itself is called.
_LOSS = "loss_fn"

#: A list or dict of more than these is data, or a vocabulary.
_MOST = 1000


def may_read(function: Any) -> bool:
    """Whether a loss function may read what layers keep: one of Paddle's, or around it, does not.

    Its own code says it, so once a batch is often enough to ask.
    """
    if is_of_library(type(function)):
        function = getattr(function, "declares", function)
    return not str(getattr(function, "__module__", "")).startswith("paddle.")


def require_nothing_kept(functions: Iterable[Any], stage: int) -> None:
    """Refuses tensors that a stage has stored for a loss that another process computes."""
    for function in functions:
        path, tensor = next(kept_for(function), ("", None))
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


def kept_for(function: Any) -> Iterator[tuple[str, Any]]:
    """Yields the path and value of each tensor with a graph that a function's code can reach."""
    if not may_read(function):
        return
    names: set[str] = set()
    count, reached = -1, list(_reachable(function, names))
    # By a name that code has an attribute is followed, which may be code with other names.
    while names and count < len(names):
        count, reached = len(names), list(_reachable(function, names))
    for path, value in reached:
        if isinstance(value, paddle.Tensor) and has_gradient(value) and not value.is_leaf:
            yield path, value


def _reachable(function: Any, names: set[str]) -> Iterator[tuple[str, Any]]:
    """Yields all objects that a function can reach; adds the names in its code to ``names``."""
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
        yield path, held_by(value)
        if not is_of_library(value):
            names |= _words_in(value.__code__)
            yield from variables_of(value).items()
    elif isinstance(value, ModuleType):
        if not is_of_library(value.__name__):
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
        if path == _LOSS and is_of_library(type(value)):
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


@functools.cache
def _words_in(code: CodeType) -> frozenset[str]:
    """Returns the names in code, and the strings that may name an attribute for ``getattr``."""
    constants = chain.from_iterable(one.co_consts for one in codes_in(code))
    return names_in(code).union(one for one in constants if isinstance(one, str))
