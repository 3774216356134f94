"""The options of a schedule as values, without those that have their default."""

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
    """Returns the names of a rows function's options, its parameters after placement and m."""
    return tuple(inspect.signature(rows).parameters)[2:]


def non_defaults(name: str, rows: Callable[..., object], options: Mapping[str, object]) -> Options:
    """Returns the options to store with a schedule: those that differ from the default.

    Args:
        name: The schedule, for the error.
        rows: The function that builds its rows; the defaults of its parameters are the default
            options.
        options: The options that it is built with.

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
