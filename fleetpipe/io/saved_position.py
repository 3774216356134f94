"""Reads saved positions in the data, and refuses by name what is none of this run's."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

from fleetpipe.errors import CheckpointError, ConfigError


def whole(name: str, value: Any, least: int = 0) -> int:
    """Returns an argument that must be a whole number.

    Args:
        name: What the caller calls it.
        value: What was given.
        least: The smallest that is taken.

    Raises:
        ConfigError: It is something else.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ConfigError(
            f"{name} must be a whole number of at least {least}",
            got=f"{name}={value!r}",
            fix=f"give {name} by its name, as a number",
        )
    return int(value)


def fields(state: Any, kinds: Mapping[str, type], of: str) -> dict[str, Any]:
    """Returns a saved position whose fields have been looked at; numbers are at least 0.

    Args:
        state: What was saved.
        kinds: The type of each field.
        of: What the position belongs to, for messages.

    Raises:
        CheckpointError: A field is missing, foreign or of another type.
    """
    given = dict(state) if isinstance(state, Mapping) else {}
    wrong = [name for name, kind in kinds.items() if type(given.get(name)) is not kind]
    numbers = [name for name, kind in kinds.items() if kind is int and name not in wrong]
    for name in [*wrong, *[name for name in numbers if given[name] < 0]]:
        raise foreign(of, f"{name}: {kinds[name].__name__}", f"{name}={given.get(name)!r}")
    if others := sorted(map(str, given.keys() - kinds.keys())):
        raise foreign(of, f"nothing but {', '.join(kinds)}", f"{', '.join(others)} as well")
    return given


def require_same(name: str, own: object, saved: object, of: str, fix: str) -> None:
    """Makes sure that a position was saved for data like these.

    Args:
        name: Of what is compared.
        own: What this run has.
        saved: What the one had that saved.
        of: What the position belongs to, for messages.
        fix: What to do where they differ.

    Raises:
        CheckpointError: They differ.
    """
    if own != saved:
        raise CheckpointError(
            f"the saved position of the {of} belongs to other data or another order of them",
            expected=f"{name}={own}, as in this run",
            got=f"{name}={saved}",
            fix=fix,
        )


def foreign(of: str, expected: str, got: str) -> CheckpointError:
    """Returns the error for what was not saved by a sampler or loader like this one.

    Args:
        of: What the position should belong to.
        expected: What it would have.
        got: What it has instead.
    """
    return CheckpointError(
        f"this is no saved position of a {of}",
        expected=expected,
        got=got,
        fix=f"give what state_dict() of a {of} returned",
    )
