"""The family of errors that fleetpipe raises.

A message says where it happened, what was expected and what was found, the likely cause and the
next step, each on its own line, so that a log of any rank can be read alone.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Collection, Iterable, Sequence
from numbers import Integral
from typing import Any

#: The largest number of axes of an array in NumPy 1, and of elements whose bytes 63 bits can count.
_MOST_AXES, _MOST_ELEMENTS = 32, 1 << 58


class FleetPipeError(Exception):
    """Base of all errors raised by fleetpipe.

    Args:
        summary: What went wrong, in one sentence.
        where: Rank, stage, action and micro-batch, as far as they are known.
        expected: The rule, or the value that was expected.
        got: The value that was there instead.
        cause: The likely cause.
        fix: The next step for the reader.
        permanent: Whether every restart of the job fails with this error again; None for the
            class's default.
    """

    #: Whether errors of the class are permanent by default.
    permanent: bool = False

    def __init__(
        self,
        summary: str,
        *,
        where: str | None = None,
        expected: str | None = None,
        got: str | None = None,
        cause: str | None = None,
        fix: str | None = None,
        permanent: bool | None = None,
    ) -> None:
        if permanent is not None:
            self.permanent = permanent
        self._summary = summary
        self._labelled = {
            "where": where,
            "expected": expected,
            "got": got,
            "likely cause": cause,
            "what to do": fix,
        }
        super().__init__(self._message())

    def add_place(self, place: str) -> None:
        """Adds a location, such as a file or a rank, in front of the error's ``where``."""
        where = self._labelled["where"]
        self._labelled["where"] = f"{place}: {where}" if where else place
        self.args = (self._message(),)

    def _message(self) -> str:
        """Returns the summary and a line for each label that has a text."""
        lines = [f"  {label}: {text}" for label, text in self._labelled.items() if text]
        return "\n".join([self._summary, *lines])


class ConfigError(FleetPipeError, ValueError):
    """A strategy, an option or an argument that cannot be used as given."""

    permanent = True


class UsageError(FleetPipeError, TypeError):
    """An object of the wrong kind, or a use of an object that it does not support."""

    permanent = True


class StateError(FleetPipeError, RuntimeError):
    """A call that came too early or too late: before ``fleet.init``, or after its job ended."""


class NotInitialized(StateError, AttributeError):
    """A call that needs a job, before ``fleet.init``.

    It is an AttributeError too, as in Paddle's Fleet, which libraries catch.
    """


class InvariantError(FleetPipeError, RuntimeError):
    """A guard found that an invariant of parallel training is broken."""


class ScheduleError(FleetPipeError, ValueError):
    """A schedule or plan that is incomplete, out of order, deadlocks or passes its memory cap."""

    permanent = True


class PartitionError(FleetPipeError, ValueError):
    """A list of layers that cannot be cut into stages as asked."""

    permanent = True


class CaptureError(FleetPipeError, ValueError):
    """A plain model that cannot be captured, or whose capture does not do what the model does."""

    permanent = True


class BoundaryError(FleetPipeError, ValueError):
    """A value that cannot cross from one stage to the next, or that the next stage cannot take."""

    permanent = True


class TransportError(FleetPipeError, RuntimeError):
    """A connection between ranks that cannot be made, or that received invalid bytes."""


class PeerFailed(FleetPipeError, ConnectionError):
    """Another rank of the job died or left before its work was done.

    Attributes:
        brief: One line for this rank's log, if the other rank logs its own error; else None.
    """

    brief: str | None = None


class PipelineTimeout(FleetPipeError, TimeoutError):
    """A wait for another rank that reached its limit."""


class CheckpointError(FleetPipeError, ValueError):
    """Saved parameters that cannot be read, or do not fit the model they are loaded into."""


class PaddleNotFound(FleetPipeError, ImportError):
    """A part of fleetpipe that needs Paddle was imported where Paddle is not installed."""

    permanent = True


def is_permanent(error: BaseException) -> bool:
    """Returns whether every restart of a job would fail with an error again.

    That is so for errors in the script's text, the installation and the script's arguments.
    """
    if isinstance(error, FleetPipeError):
        return error.permanent
    if isinstance(error, (ModuleNotFoundError, SyntaxError)):
        return True
    # Another ImportError may be a library that could not be loaded for want of memory.
    return isinstance(error, ImportError) and str(error).startswith("cannot import name")


class PackageNotFound(ConfigError, ImportError):
    """An optional package that was needed is not installed."""


def require_whole(
    name: str,
    value: Any,
    least: int = 1,
    *,
    rule: str | None = None,
    where: str | None = None,
    fix: str = "",
) -> int:
    """Returns the value of an argument as an int, after a check that it is a whole number.

    Args:
        name: The argument's name.
        value: Its value.
        least: The smallest number allowed.
        rule: The rule for the message; by default "a whole number of at least ``least``".
        where: The place of the error, if there is more to say than the name.
        fix: The next step for the reader; by default two numbers that will do.

    Raises:
        ConfigError: The value is no whole number, or below ``least``.
    """
    if is_whole_number(value, least):
        return int(value)
    rule = rule or f"{name} must be a whole number of at least {least}"
    fix = fix or f"give a number such as {least or 1} or {4 * (least or 1)}"
    raise ConfigError(rule, where=where, got=f"{name}={value!r}", fix=fix)


def is_whole_number(value: Any, least: int = 1) -> bool:
    """Returns whether a value is an integer of at least ``least``; True and 1.0 are none."""
    return type(value) is not bool and isinstance(value, Integral) and int(value) >= least


def is_shape(sizes: Collection[Any]) -> bool:
    """Returns whether sizes, which a file or a message contains, can be a tensor's shape.

    A few bytes of a file may claim a hundred thousand axes, or sizes of hundreds of digits, whose
    product must not be computed.
    """
    if len(sizes) > _MOST_AXES or not all(type(size) is int and size >= 0 for size in sizes):
        return False
    # NumPy also multiplies the sizes beside one that is 0.
    return bool(math.prod(size or 1 for size in sizes) < _MOST_ELEMENTS)


def is_file_name(name: str) -> bool:
    """Returns whether a text, which a file contains, can be the name of a visible file in a folder.

    A name with a path, a hidden name, and one that is too long or cannot be encoded are refused.
    """
    try:
        size = len(os.fsencode(name))
    except UnicodeEncodeError:
        return False
    visible = os.path.basename(name) == name and not name.startswith(".") and "\0" not in name
    return visible and 0 < size < 256


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns a phrase for an unknown name: the ``names`` that are most like it, or all of them.

    Upper and lower case are equal, and the dashes before an option are no part of its name.
    """
    options = sorted(names)
    spellings = {option.lower().lstrip("-"): option for option in options}
    plain_name = name.lower().lstrip("-")
    close = difflib.get_close_matches(plain_name, spellings, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(spellings[plain]) for plain in close) + "?"
    return "known: " + ", ".join(options)


def listed(names: Sequence[str], most: int = 4) -> str:
    """Returns the first ``most`` names, separated by commas, and ``..`` if there are more."""
    return ", ".join(names[:most]) + (", .." if len(names) > most else "")


def reason(error: Exception) -> str:
    """Returns the type of an error and the most telling line of its message.

    For an error of Paddle's this is the last line that neither only names the kernel nor only
    repeats the condition that does not hold.
    """
    lines = [line.strip() for line in str(error).splitlines()]
    telling = [line for line in lines if line and not line.startswith(("[operator <", "[Hint:"))]
    return f"{type(error).__name__}: {(telling or [''])[-1]}"


def printable(text: str) -> str:
    """Returns a text for a terminal: control characters escaped, lines cut after 1000 letters."""

    def escaped(line: str) -> str:
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)

    lines = map(escaped, text.split("\n"))
    return "\n".join(f"{line[:1000]} .." if len(line) > 1000 else line for line in lines)
