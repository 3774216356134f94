"""Reads the code of functions: its names and values, and whether it draws from Python's generators.

Python's generators are those of ``random`` and NumPy. Watching their states would not show who
draws, because threads that load data draw from them at the same time. So the search follows the
names in the code of a function to the objects that they stand for, and so on.
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

#: The names of packages whose code is not the user's: Python's own, Paddle, NumPy and fleetpipe.
LIBRARIES = (sys.stdlib_module_names | {"paddle", "numpy", "fleetpipe"}) - {"__main__"}

#: The generators behind the functions of ``random`` and ``numpy.random``.
_GENERATORS = (random.random.__self__, np.random.rand.__self__)  # type: ignore[attr-defined]
_GENERATOR_MODULES: tuple[types.ModuleType, ...] = (random, np.random)

#: Packages of Paddle that draw from these generators, so that their code is read, too.
_PACKAGES_THAT_DRAW = ("paddle.vision.transforms",)

#: Types of objects that hold no code.
_TYPES_WITHOUT_CODE = frozenset({bool, int, float, complex, str, bytes, type(None)})

#: Types of objects that have code or lead to a generator: functions, modules and classes.
_TYPES_OF_CODE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)

#: For types of objects that call others, the names of the attributes with what they call.
_ATTRIBUTES_BY_TYPE: dict[type, tuple[str, ...]] = {
    types.MethodType: ("__func__", "__self__"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget",),
    functools.cached_property: ("func",),
}

#: Answers by the ``id`` of an object, since objects may compare by value. Each comes with a weak
#: reference that removes it with the object: hooks are new in each forward.
_Answers = dict[int, tuple[weakref.ref[Any], bool]]
_answers_by_function: _Answers = {}
_answers_by_code: _Answers = {}


def is_of_library(value: object) -> bool:
    """Whether a module, given by name or by an object in it, belongs to ``LIBRARIES``."""
    module = value if isinstance(value, str) else getattr(value, "__module__", "builtins")
    return str(module).partition(".")[0] in LIBRARIES


def is_installed(module: str) -> bool:
    """Whether the module with a name belongs to an installed package, not to the script."""
    root = sys.modules.get(module.partition(".")[0])
    file = str(getattr(root, "__file__", None) or "")
    return "site-packages" in file or "dist-packages" in file


@cache
def codes_in(code: CodeType) -> tuple[CodeType, ...]:
    """Returns a code object, and those of the functions and comprehensions defined within it."""
    inner = (codes_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return (code, *chain.from_iterable(inner))


@cache
def names_in(code: CodeType) -> frozenset[str]:
    """Returns the names of variables, attributes and modules in code, nested functions included."""
    return frozenset(chain.from_iterable(inner.co_names for inner in codes_in(code)))


@cache
def _names_in_instructions(code: CodeType, operation: str) -> tuple[str, ...]:
    """Returns the names in the instructions of code whose opcodes end with ``operation``."""
    instructions = chain.from_iterable(map(dis.get_instructions, codes_in(code)))
    names = (one.argval for one in instructions if one.opname.endswith(operation))
    return tuple(dict.fromkeys(names))


def imports_in(code: CodeType) -> tuple[str, ...]:
    """Returns the names of the modules that code imports, nested functions included."""
    return _names_in_instructions(code, "IMPORT_NAME")


def variables_of(function: FunctionType) -> dict[str, object]:
    """Returns the module variables that a function's code names, by name."""
    variables = function.__globals__
    names = _names_in_instructions(function.__code__, "_GLOBAL")
    return {name: variables[name] for name in names if name in variables}


def closure_values(function: FunctionType) -> list[object]:
    """Returns the values in a function's closure, and the defaults of its arguments."""
    # An unbound cell has no contents.
    cells = [c.cell_contents for c in function.__closure__ or () if hasattr(c, "cell_contents")]
    return [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def draws_python(function: Callable[[Nest], Nest]) -> bool:
    """Whether code that a function or a layer may run can draw from Python's generators.

    The code of its hooks counts, and that of objects in its attributes and containers. Each
    function or layer is read once, before its first run: later changes are not seen.
    """

    def code_draws(code: Any) -> bool:
        return _answer_once(_answers_by_code, code, lambda: _reaches_generator(code))

    return _answer_once(
        _answers_by_function, function, lambda: any(map(code_draws, _iterate_code(function)))
    )


def _answer_once(answers: _Answers, value: Any, decide: Callable[[], bool]) -> bool:
    """Returns the stored answer for an object, or calls ``decide`` and stores its result."""
    if type(value).__weakrefoffset__ == 0:
        return decide()
    key = id(value)
    if key not in answers:
        answer = decide()
        answers[key] = weakref.ref(value, functools.partial(answers.pop, key)), answer
    _, answer = answers[key]
    return answer


def _reaches_generator(code: Any) -> bool:
    """Whether the names in code lead to a random generator, perhaps through other code.

    Args:
        code: A function, a class, a module or a generator.
    """
    stack: list[tuple[Any, frozenset[str] | None]] = [(code, None)]
    seen: dict[Any, Any] = {}
    while stack:
        value, names = stack.pop()
        key = id(value), names if isinstance(value, types.ModuleType) else None
        if key in seen:
            continue
        # The stored object stays alive, so no other object gets its id.
        seen[key] = value
        if _is_generator(value, names):
            return True
        names, values = _names_and_values(value, names)
        stack += [(inner, names) for reached in values for inner in _iterate_code(reached)]
    return False


def _is_generator(value: Any, names: frozenset[str] | None) -> bool:
    """Whether an object is a random generator, a method of one, or a module with generators.

    Args:
        value: The object.
        names: The names in the code that uses a module; None if it may use all of the module.
    """
    if isinstance(value, types.ModuleType):
        return value in _GENERATOR_MODULES or (value is np and (names is None or "random" in names))
    owner = getattr(value, "__self__", None)
    return any(value is generator or owner is generator for generator in _GENERATORS)


def _names_and_values(
    value: Any, names: frozenset[str] | None
) -> tuple[frozenset[str] | None, list[Any]]:
    """Returns the values that a function, a class or a module may use, and the names in its code.

    Args:
        value: The function, class or module.
        names: The names in the code that uses a module; None if it may use all of the module.

    Returns:
        The names in the code of a function, None for a class, ``names`` for a module; and the
        values: of a module those with one of the names.
    """
    if _is_skipped(value.__name__ if isinstance(value, types.ModuleType) else value):
        return names, []
    if isinstance(value, types.FunctionType):
        code = value.__code__
        modules = [sys.modules.get(name) for name in imports_in(code)]
        return names_in(code), [*variables_of(value).values(), *closure_values(value), *modules]
    if isinstance(value, types.ModuleType):
        return names, [v for name, v in vars(value).items() if names is None or name in names]
    members = [vars(base) for base in getattr(value, "__mro__", ()) if not _is_skipped(base)]
    return None, [v for base in members for name, v in base.items() if name != "__init__"]


def _iterate_code(value: Any) -> Iterator[Any]:
    """Yields the functions, classes, modules and generators that a value is or contains."""
    stack, seen = [value], {}
    while stack:
        item = stack.pop()
        kind = type(item)
        if kind in _TYPES_WITHOUT_CODE or id(item) in seen:
            continue
        seen[id(item)] = item
        # By its type, since an object that replaces a value of another stage refuses isinstance.
        if issubclass(kind, _TYPES_OF_CODE) or any(item is generator for generator in _GENERATORS):
            yield item
        elif issubclass(kind, dict):
            stack += item.values()
        elif issubclass(kind, (list, tuple, set, frozenset)):
            stack += item
        elif issubclass(kind, functools.partial):
            stack += (item.func, *item.args, *item.keywords.values())
        elif issubclass(kind, paddle.nn.Layer) or not _is_skipped(kind):
            yield kind
            stack += _iterate_attributes(item)
        stack += [getattr(item, name) for name in _ATTRIBUTES_BY_TYPE.get(kind, ())]
        stack.append(_dict_of(item).get("__wrapped__"))


def _iterate_attributes(value: Any) -> Iterator[Any]:
    """Yields the values of an object's attributes and slots, without its properties."""
    yield from _dict_of(value).values()
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield getattr(value, name, None)


def _dict_of(value: Any) -> Mapping[str, Any]:
    """Returns the ``__dict__`` of an object; empty if it has none."""
    try:
        attributes: Mapping[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return attributes


def _is_skipped(value: object) -> bool:
    """Whether a module, by name or by an object in it, is of a library whose code is not read."""
    module = value if isinstance(value, str) else getattr(value, "__module__", None)
    return is_of_library(value) and not str(module).startswith(_PACKAGES_THAT_DRAW)
