"""Finds layers that draw from Python's or NumPy's own generators, by reading their code.

Watching the generators would not show it, since threads that load data draw from them at the same
time.
"""

from __future__ import annotations

import functools
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fleetpipe.aliases import Nest
from fleetpipe.dygraph.code_names import (
    codes_in,
    held_by,
    imports_in,
    is_of_library,
    names_in,
    variables_of,
)
from fleetpipe.paddle_api import paddle

_GENERATORS = (random.random.__self__, np.random.rand.__self__)  # type: ignore[attr-defined]
_MODULES: tuple[types.ModuleType, ...] = (random, np.random)

#: By ``id``, with a reference that ends the entry: hooks come with each forward, and an object may
#: compare by value.
_results: dict[int, tuple[weakref.ref[Any], bool]] = {}


def draws_python(function: Callable[[Nest], Nest]) -> bool:
    """Whether code that a function or a layer runs, as far as it is known, names a generator."""
    code: Any = next(_functions(function), function)
    if type(code).__weakrefoffset__ == 0:
        return _runs_draws(code, set())
    key = id(code)
    if key not in _results:
        gone = weakref.ref(code, functools.partial(_results.pop, key))
        _results[key] = gone, _runs_draws(code, set())
    return _results[key][1]


def _runs_draws(value: Any, seen: set[Any]) -> bool:
    codes = [*_functions(value)]
    return any(_draws(code, seen) for code in codes) if codes else _of_object(value, seen)


def _of_object(thing: Any, seen: set[Any]) -> bool:
    """Whether methods of an object or its sublayers draw, or callables that these hold."""
    parts = thing.sublayers(include_self=True) if isinstance(thing, paddle.nn.Layer) else [thing]
    held = [v for part in parts for v in getattr(part, "__dict__", {}).values() if callable(v)]
    return any(_of_class(type(one), seen) for one in (*parts, *held)) or any(
        _draws(function, seen) for one in held for function in _functions(one)
    )


def _of_class(kind: type, seen: set[Any]) -> bool:
    if kind in seen:
        return False
    seen.add(kind)
    members = [
        member
        for base in kind.__mro__
        if not is_of_library(base)
        for name, member in vars(base).items()
        if name != "__init__"
    ]
    return any(_draws(function, seen) for member in members for function in _functions(member))


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """Yields the Python functions that a value runs when it is called, as far as they are known."""
    while isinstance(value, functools.partial):
        value = value.func
    value = getattr(value, "__wrapped__", getattr(value, "__func__", value))
    if isinstance(value, types.FunctionType):
        yield value


def _draws(function: types.FunctionType, seen: set[Any]) -> bool:
    if function.__code__ in seen or is_of_library(function):
        return False
    code = function.__code__
    seen.update(codes_in(code))
    names = names_in(code)
    values = [*variables_of(function).values(), *held_by(function)]
    values += [sys.modules.get(name) for name in imports_in(code)]
    return any(_is_drawn(value, names, seen) for value in values)


def _is_drawn(value: Any, names: frozenset[str], seen: set[Any]) -> bool:
    if isinstance(value, types.ModuleType):
        return value in _MODULES or (value is np and "random" in names)
    if any(getattr(value, "__self__", None) is generator for generator in _GENERATORS):
        return True
    return _runs_draws(value, seen)
