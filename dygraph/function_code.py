"""Reads functions' code: the names and values in it, and whether it draws from Python's generators.

Python's generators are those of ``random`` and NumPy. Watching their states would not show who
draws, because threads that load data draw from them at the same time.
"""

from __future__ import annotations

import dis
import functools
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import chain
from types import CodeType, FunctionType
from typing import Any

import numpy as np

from fleetpipe.aliases import Nest
from fleetpipe.paddle_api import paddle

#: Packages whose code is not that of a user's model.
LIBRARIES = (sys.stdlib_module_names | {"paddle", "numpy", "fleetpipe"}) - {"__main__"}

_GENERATORS = (random.random.__self__, np.random.rand.__self__)  # type: ignore[attr-defined]
_MODULES: tuple[types.ModuleType, ...] = (random, np.random)

#: Packages of libraries whose code is read all the same: it draws from these generators.
_READ = ("paddle.vision.transforms",)

_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})

#: Types of objects that have code, or that lead to a generator.
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)

#: The attributes in which an object of a type has the functions and objects that it calls.
_WRAPPED: dict[type, tuple[str, ...]] = {
    types.MethodType: ("__func__", "__self__"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget",),
    functools.cached_property: ("func",),
}

#: Results by ``id``, each with a weak reference that removes it: hooks are new in each forward, and
#: objects may compare by value.
_Results = dict[int, tuple[weakref.ref[Any], bool]]
_of_values: _Results = {}
_of_code: _Results = {}


def is_of_library(thing: object) -> bool:
    """Whether an object's module, or the module of a name, belongs to one of ``LIBRARIES``."""
    module = thing if isinstance(thing, str) else getattr(thing, "__module__", "builtins")
    return str(module).partition(".")[0] in LIBRARIES


def is_installed(module: str) -> bool:
    """Whether a module belongs to an installed package, not to the script."""
    root = sys.modules.get(module.partition(".")[0])
    file = str(getattr(root, "__file__", None) or "")
    return "site-packages" in file or "dist-packages" in file


@cache
def codes_in(code: CodeType) -> tuple[CodeType, ...]:
    """Returns a code object, and those of functions and comprehensions within it."""
    inner = (codes_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return (code, *chain.from_iterable(inner))


@cache
def names_in(code: CodeType) -> frozenset[str]:
    """Returns the names of variables, attributes and modules in code, nested code included."""
    return frozenset(chain.from_iterable(one.co_names for one in codes_in(code)))


@cache
def _named_by(code: CodeType, operation: str) -> tuple[str, ...]:
    """Returns the names in instructions whose opcode ends with ``operation``, nested ones too."""
    steps = chain.from_iterable(map(dis.get_instructions, codes_in(code)))
    return tuple(dict.fromkeys(s.argval for s in steps if s.opname.endswith(operation)))


def imports_in(code: CodeType) -> tuple[str, ...]:
    """Returns the names of the modules that code imports, nested code included."""
    return _named_by(code, "IMPORT_NAME")


def variables_of(function: FunctionType) -> dict[str, object]:
    """Returns the module variables that a function's code names, by name."""
    there = function.__globals__
    return {name: there[name] for name in _named_by(function.__code__, "_GLOBAL") if name in there}


def held_by(function: FunctionType) -> list[object]:
    """Returns the values in a function's closure, and its defaults."""
    # An unbound cell has no contents.
    cells = [c.cell_contents for c in function.__closure__ or () if hasattr(c, "cell_contents")]
    return [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def draws_python(function: Callable[[Nest], Nest]) -> bool:
    """Whether the code that a function or a layer runs names one of Python's generators.

    The code of hooks counts, and that of objects in attributes and containers. A layer is read
    once, before its first run: later changes are not seen.
    """

    def code_draws(code: Any) -> bool:
        return _decide_once(_of_code, code, lambda: _reaches_generator(code))

    return _decide_once(_of_values, function, lambda: any(map(code_draws, _code_in(function))))


def _decide_once(results: _Results, thing: Any, decide: Callable[[], bool]) -> bool:
    """Returns the stored result for an object, or calls ``decide`` and stores the result."""
    if type(thing).__weakrefoffset__ == 0:
        return decide()
    key = id(thing)
    if key not in results:
        result = decide()
        results[key] = weakref.ref(thing, functools.partial(results.pop, key)), result
    return results[key][1]


def _reaches_generator(code: Any) -> bool:
    """Whether code can reach a generator by its names, and by the code that these reach."""
    waiting: list[tuple[Any, frozenset[str] | None]] = [(code, None)]
    seen: dict[Any, Any] = {}
    while waiting:
        one, names = waiting.pop()
        key = id(one), names if isinstance(one, types.ModuleType) else None
        if key in seen:
            continue
        # The stored object stays alive, so no other object gets its id.
        seen[key] = one
        if _is_generator(one, names):
            return True
        names, values = _values_in(one, names)
        waiting += [(code, names) for value in values for code in _code_in(value)]
    return False


def _is_generator(one: Any, names: frozenset[str] | None) -> bool:
    """Whether an object is a generator, or a module of generators that ``names`` may use."""
    if isinstance(one, types.ModuleType):
        return one in _MODULES or (one is np and (names is None or "random" in names))
    return any(one is it or getattr(one, "__self__", None) is it for it in _GENERATORS)


def _values_in(one: Any, names: frozenset[str] | None) -> tuple[frozenset[str] | None, list[Any]]:
    """Returns the names in a function, a class or a module, and the values that it may use.

    A module's values are those that ``names`` has; None stands for all names.
    """
    if _is_silent(one.__name__ if isinstance(one, types.ModuleType) else one):
        return names, []
    if isinstance(one, types.FunctionType):
        code = one.__code__
        modules = [sys.modules.get(name) for name in imports_in(code)]
        return names_in(code), [*variables_of(one).values(), *held_by(one), *modules]
    if isinstance(one, types.ModuleType):
        return names, [v for name, v in vars(one).items() if names is None or name in names]
    members = [vars(base) for base in getattr(one, "__mro__", ()) if not _is_silent(base)]
    return None, [v for base in members for name, v in base.items() if name != "__init__"]


def _code_in(value: Any) -> Iterator[Any]:
    """Yields the functions, classes, modules and generators that a value is or holds."""
    waiting, seen = [value], {}
    while waiting:
        one = waiting.pop()
        kind = type(one)
        if kind in _PLAIN or id(one) in seen:
            continue
        seen[id(one)] = one
        # By its type, since an object that replaces a value of another stage refuses isinstance.
        if issubclass(kind, _CODE) or any(one is generator for generator in _GENERATORS):
            yield one
        elif issubclass(kind, dict):
            waiting += one.values()
        elif issubclass(kind, (list, tuple, set, frozenset)):
            waiting += one
        elif issubclass(kind, functools.partial):
            waiting += (one.func, *one.args, *one.keywords.values())
        elif issubclass(kind, paddle.nn.Layer) or not _is_silent(kind):
            yield kind
            waiting += _attributes(one)
        waiting += [getattr(one, name) for name in _WRAPPED.get(kind, ())]
        waiting.append(_dict_of(one).get("__wrapped__"))


def _attributes(one: Any) -> Iterator[Any]:
    """Yields the values of an object's attributes, without its properties."""
    yield from _dict_of(one).values()
    for base in type(one).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield getattr(one, name, None)


def _dict_of(one: Any) -> Mapping[str, Any]:
    """Returns the ``__dict__`` of an object; empty if it has none."""
    try:
        attributes: Mapping[str, Any] = object.__getattribute__(one, "__dict__")
    except AttributeError:
        return {}
    return attributes


def _is_silent(thing: object) -> bool:
    """Whether an object, or the module of a name, belongs to a library whose code is not read."""
    module = thing if isinstance(thing, str) else getattr(thing, "__module__", None)
    return is_of_library(thing) and not str(module).startswith(_READ)
