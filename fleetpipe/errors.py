"""The one family of errors that fleetpipe raises.

A message says where it happened, what was expected and what was found, the likely cause and the
next step, each on its own line, so that a log of any rank can be read alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any


class FleetPipeError(Exception):
    """Base of all errors raised by fleetpipe.

    Args:
        summary: What went wrong, in one sentence.
        where: Rank, stage, action and micro-batch, as far as they are known.
        expected: What the rule asks for.
        got: What was found instead.
        cause: The likely cause.
        fix: The next step for the reader.
        permanent: Whether the same job fails with it however often it is started.
    """

    #: That of the errors of a class that are not told otherwise.
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
        super().__init__(self._text())

    def add_place(self, place: str) -> None:
        """Puts what a caller further out knows in front of ``where``."""
        where = self._labelled["where"]
        self._labelled["where"] = f"{place}: {where}" if where else place
        self.args = (self._text(),)

    def _text(self) -> str:
        lines = [f"  {label}: {text}" for label, text in self._labelled.items() if text]
        return "\n".join([self._summary, *lines])


class ConfigError(FleetPipeError, ValueError):
    """A strategy, an option or an argument that cannot be used as given."""

    permanent = True


class UsageError(FleetPipeError, TypeError):
    """An object that was given to, or asked for, what is not made for it."""

    permanent = True


class StateError(FleetPipeError, RuntimeError):
    """A call that came too early or too late: before ``fleet.init``, or after its job ended."""


class NotInitialized(StateError, AttributeError):
    """There is no job: an AttributeError too, as in Paddle's Fleet, which libraries catch."""


class InvariantError(FleetPipeError, RuntimeError):
    """What must hold of a parallel training does not: a guard has seen it."""


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
    """A connection between ranks that cannot be made, or that carries what it should not."""


class PeerFailed(FleetPipeError, ConnectionError):
    """Another rank of the job died or left before its work was done.

    Attributes:
        brief: One line for this rank's log where the other rank shows its own error; else None.
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
    """Whether a job fails with an error however often it is started: nothing that passes caused it.

    That is an error of the script's text, of what is installed, or of what the script asks for.
    """
    if isinstance(error, FleetPipeError):
        return error.permanent
    # Another ImportError may be a library that could not be loaded for want of memory.
    absent = isinstance(error, ImportError) and str(error).startswith("cannot import name")
    return absent or isinstance(error, (ModuleNotFoundError, SyntaxError))


class PackageNotFound(ConfigError, ImportError):
    """A package that only some parts need is not installed."""


def require_whole(
    name: str,
    value: Any,
    least: int = 1,
    *,
    rule: str | None = None,
    where: str | None = None,
    fix: str = "give a number such as 1 or 4",
) -> int:
    """Returns an argument that must be a whole number.

    Args:
        name: The argument's name.
        value: Its value.
        least: The smallest that is taken.
        rule: What it must be, where a whole number of at least ``least`` says too little.
        where: As of :class:`FleetPipeError`.
        fix: Likewise.

    Raises:
        ConfigError: It is no whole number, or below ``least``.
    """
    if is_whole_number(value, least):
        return int(value)
    rule = rule or f"{name} must be a whole number of at least {least}"
    raise ConfigError(rule, where=where, got=f"{name}={value!r}", fix=fix)


def is_whole_number(value: Any, least: int = 1) -> bool:
    """Whether a value is a whole number of at least ``least``, which True and 1.0 are not."""
    return type(value) is not bool and isinstance(value, Integral) and int(value) >= least


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns a phrase that names the entries of ``names`` closest to ``name``, or all of them.

    Upper and lower case do not count.
    """
    options = sorted(names)
    spellings = {option.lower(): option for option in options}
    close = difflib.get_close_matches(name.lower(), spellings, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(spellings[plain]) for plain in close) + "?"
    return "known: " + ", ".join(options)


def listed(names: Sequence[str], most: int = 4) -> str:
    """Returns the first of some names for a message; ``..`` stands for the others."""
    return ", ".join(names[:most]) + (", .." if len(names) > most else "")


def reason(error: Exception) -> str:
    """Returns the kind of an error and the line of it that says most.

    Of an error of Paddle's this is the last that does not only name the kernel.
    """
    lines = [line.strip() for line in str(error).splitlines()]
    telling = [line for line in lines if line and not line.startswith("[operator <")]
    return f"{type(error).__name__}: {(telling or [''])[-1]}"


def printable(text: str) -> str:
    """Returns text as a terminal may show it: no control characters, and no line without an end."""
    lines = [
        "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line) for line in text.split("\n")
    ]
    return "\n".join(f"{line[:1000]} .." if len(line) > 1000 else line for line in lines)
