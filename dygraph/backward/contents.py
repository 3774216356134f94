"""Containers in which layers may leave values besides their output: lists, dicts, sets, objects."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from operator import is_
from types import FunctionType
from typing import Any

from fleetpipe.aliases import Layer
from fleetpipe.dygraph.code_names import held_by, is_of_library, names_in, variables_of
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.layer import forward_hooks

#: What something can be put into.
CONTAINERS = (list, dict, set, deque)


def content_of(container: Any) -> Any:
    """Returns a copy of a container's content, for :func:`refill`."""
    return container.copy() if container else ()


def refill(container: Any, content: Any) -> None:
    """Replaces a container's content, in place, if it has changed."""
    same = len(container) == len(content) and all(map(is_, container, content))
    if same and isinstance(container, dict) and content:
        same = all(map(is_, container.values(), content.values()))
    # Else others may look into it just now.
    if not same:
        container.clear()
        (container.extend if isinstance(container, (list, deque)) else container.update)(content)


def reachable_containers(layers: Collection[Layer], functions: Iterable[object]) -> Iterator[Any]:
    """Yields the containers, and the attribute dicts of objects, that a forward may write to.

    They are what the code of forwards, hooks and functions names: module variables, values of
    closures, attributes. The code of the methods and functions that it calls counts too, but not
    that of what those call: a walk through all that code can reach would have no end.
    """
    classes = {type(layer) for layer in layers if not is_of_library(type(layer))}
    hooks = (hook for layer in layers for table in forward_hooks(layer) for hook in table.values())
    code = list(filter(_is_of_user, (*functions, *hooks, *(one.forward for one in classes))))
    helpers = [value for function in code for value in variables_of(function).values()]
    helpers += [vars(one).get(name) for one in classes for name in _names(code)]
    code += filter(_is_of_user, helpers)
    names = _names(code)
    values: list[Any] = []
    for function in code:
        values += (*variables_of(function).values(), *held_by(function))
    for layer in layers:
        attributes = vars(layer)
        values += [attributes[name] for name in names & attributes.keys()]
    for value in {id(value): value for value in values}.values():
        yield from _in(value, names)


def _in(value: Any, names: frozenset[str]) -> Iterator[Any]:
    """Yields a container itself, or the containers in a user's object or class."""
    if isinstance(value, CONTAINERS):
        yield value
        return
    kind = value if isinstance(value, type) else type(value)
    if is_of_library(kind) or isinstance(value, paddle.nn.Layer):
        return
    tables = [vars(kind)]
    if kind is not value and hasattr(value, "__dict__"):
        yield vars(value)
        tables.append(vars(value))
    parts = (table[name] for table in tables for name in names & table.keys())
    yield from (part for part in parts if isinstance(part, CONTAINERS))


def _names(code: Iterable[FunctionType]) -> frozenset[str]:
    return frozenset[str]().union(*(names_in(function.__code__) for function in code))


def _is_of_user(function: object) -> bool:
    return isinstance(function, FunctionType) and not is_of_library(function)
