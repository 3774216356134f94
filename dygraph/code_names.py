"""Finds the names and values in functions' code: module variables, attributes, cells, defaults."""

from __future__ import annotations

import dis
import sys
from functools import cache
from itertools import chain
from types import CodeType, FunctionType

#: Packages whose code says nothing of a user's model.
LIBRARIES = (sys.stdlib_module_names | {"paddle", "numpy", "fleetpipe"}) - {"__main__"}


def is_of_library(thing: object) -> bool:
    """Whether a module of this name, or the module of an object, belongs to a library."""
    module = thing if isinstance(thing, str) else getattr(thing, "__module__", "builtins")
    return str(module).partition(".")[0] in LIBRARIES


def is_installed(module: str) -> bool:
    """Whether a module is of an installed package, not of the script's own."""
    root = sys.modules.get(module.partition(".")[0])
    file = str(getattr(root, "__file__", None) or "")
    return "site-packages" in file or "dist-packages" in file


@cache
def codes_in(code: CodeType) -> tuple[CodeType, ...]:
    """Returns a code object and those of the functions and comprehensions within it."""
    inner = (codes_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return (code, *chain.from_iterable(inner))


@cache
def names_in(code: CodeType) -> frozenset[str]:
    """Returns the names of variables, attributes and modules in code and in code within it."""
    return frozenset(chain.from_iterable(one.co_names for one in codes_in(code)))


@cache
def _named_by(code: CodeType, operation: str) -> tuple[str, ...]:
    """Returns what operations of a kind, by the end of its name, name in code and within it."""
    steps = chain.from_iterable(map(dis.get_instructions, codes_in(code)))
    return tuple(dict.fromkeys(s.argval for s in steps if s.opname.endswith(operation)))


def imports_in(code: CodeType) -> tuple[str, ...]:
    """Returns the names of the modules that code imports, in code within it too."""
    return _named_by(code, "IMPORT_NAME")


def variables_of(function: FunctionType) -> dict[str, object]:
    """Returns the module variables that a function's code names, with their values."""
    there = function.__globals__
    return {name: there[name] for name in _named_by(function.__code__, "_GLOBAL") if name in there}


def held_by(function: FunctionType) -> list[object]:
    """Returns the values in a function's closure, and its defaults."""
    # A cell that is not bound yet has no contents.
    cells = [c.cell_contents for c in function.__closure__ or () if hasattr(c, "cell_contents")]
    return [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
