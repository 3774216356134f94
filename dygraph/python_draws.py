"""Finds layers that draw from Python's or NumPy's own generators, by reading their code.

Watching the generators would not show it, since threads that load data draw from them at the same
time.
"""

from __future__ import annotations

import dis
import functools
import random
import sys
import types
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from fleetpipe.aliases import Nest
from fleetpipe.dygraph.code_names import codes_in, held_by, is_of_library, names_in, variables_of
from fleetpipe.paddle_api import paddle

_GENERATORS = (random.random.__self__, np.random.rand.__self__)  # type: ignore[attr-defined]
_MODULES: tuple[types.ModuleType, ...] = (random, np.random)

_of_objects: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def draws_python(function: Callable[[Nest], Nest]) -> bool:
    """Whether code that a function or a layer runs, as far as it is known, names a generator."""
    codes = [*_functions(function)]
    if codes:
        return any(map(_in_code, codes))
    if type(function).__weakrefoffset__ == 0:
        return _of_object(function, set())
    if function not in _of_objects:
        _of_objects[function] = _of_object(function, set())
    return _of_objects[function]


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


@functools.cache
def _in_code(function: types.FunctionType) -> bool:
    """Whether a function draws, or a user's function that it names."""
    return _draws(function, set())


def _draws(function: types.FunctionType, seen: set[Any]) -> bool:
    if function.__code__ in seen or is_of_library(function):
        return False
    codes = codes_in(function.__code__)
    seen.update(codes)
    names = names_in(function.__code__)
    steps = chain.from_iterable(map(dis.get_instructions, codes))
    imported = {step.argval for step in steps if step.opname == "IMPORT_NAME"}
    values = [*variables_of(function).values(), *held_by(function)]
    values += [sys.modules.get(name) for name in imported]
    return any(_is_drawn(value, names, seen) for value in values)


def _is_drawn(value: Any, names: frozenset[str], seen: set[Any]) -> bool:
    if isinstance(value, types.ModuleType):
        return value in _MODULES or (value is np and "random" in names)
    if any(getattr(value, "__self__", None) is generator for generator in _GENERATORS):
        return True
    codes = [*_functions(value)]
    return any(_draws(code, seen) for code in codes) if codes else _of_object(value, seen)
