"""Options of a schedule as values: what it was built with, where that is not the usual."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from fleetpipe.errors import ConfigError

#: Pairs of a name and a value, sorted by name.
Options = tuple[tuple[str, Any], ...]


@cache
def names_of(rows: Callable[..., object]) -> tuple[str, ...]:
    """Returns the names of the options of a function that takes a placement and m before them."""
    return tuple(inspect.signature(rows).parameters)[2:]


def kept(name: str, rows: Callable[..., object], options: Mapping[str, object]) -> Options:
    """Returns what a schedule keeps of its options: those that differ from the usual.

    Args:
        name: The schedule, for the error.
        rows: What makes its rows; the defaults of its parameters are the usual.
        options: What it is built with.

    Raises:
        ConfigError: A value that has no text form.
    """
    parameters = inspect.signature(rows).parameters
    pairs = ((option, _value(name, option, value)) for option, value in options.items())
    return tuple(sorted(pair for pair in pairs if pair[1] != parameters[pair[0]].default))


def _value(name: str, option: str, value: object) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_value(name, option, item) for item in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ConfigError(
        f"the option {option!r} of {name} has a value that a schedule cannot keep",
        expected="a number, a word, or a list of them",
        got=repr(value),
        fix="let the function that makes the rows take such values",
    )
