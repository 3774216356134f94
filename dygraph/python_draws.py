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

from fleetpipe.aliases import Layer, Nest
from fleetpipe.dygraph.code_names import codes_in, held_by, is_of_library, names_in, variables_of
from fleetpipe.paddle_api import paddle

_GENERATORS = (random.random.__self__, np.random.rand.__self__)  # type: ignore[attr-defined]
_MODULES: tuple[types.ModuleType, ...] = (random, np.random)

_of_layers: WeakKeyDictionary[Layer, bool] = WeakKeyDictionary()


def draws_python(function: Callable[[Nest], Nest]) -> bool:
    """Whether the code of a function, or of a layer or its sublayers, names such a generator."""
    if not isinstance(function, paddle.nn.Layer):
        return any(_in_code(code) for code in _functions(function))
    if function not in _of_layers:
        kinds: set[Any] = {type(layer) for layer in function.sublayers(include_self=True)}
        _of_layers[function] = any(_of_class(kind) for kind in kinds)
    return _of_layers[function]


@functools.cache
def _of_class(kind: type) -> bool:
    members = [
        member
        for base in kind.__mro__
        if not is_of_library(base)
        for name, member in vars(base).items()
        if name != "__init__"
    ]
    return any(_in_code(function) for member in members for function in _functions(member))


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


def _draws(function: types.FunctionType, seen: set[types.CodeType]) -> bool:
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


def _is_drawn(value: Any, names: frozenset[str], seen: set[types.CodeType]) -> bool:
    if isinstance(value, types.ModuleType):
        return value in _MODULES or (value is np and "random" in names)
    if any(getattr(value, "__self__", None) is generator for generator in _GENERATORS):
        return True
    return any(_draws(function, seen) for function in _functions(value))
