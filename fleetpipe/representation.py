"""Formats values as text: a short ``repr`` for classes, and tables."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from pathlib import PurePath
from typing import TypeVar

#: The largest number of characters of a ``repr``, and of one value in it.
_LONGEST = 200
_LONGEST_VALUE = 80

Class = TypeVar("Class", bound=type)


def shows(*names: str, **labelled: str) -> Callable[[Class], Class]:
    """Returns a class decorator that gives a ``repr`` such as ``<Profile layers=12, splits=True>``.

    Args:
        names: Attributes to show, if the object has them.
        labelled: Attributes, or paths of them, by the label to show: ``ranks="plan.ranks"``.
    """
    shown = {**{name: name for name in names}, **labelled}

    def add_repr(cls: Class) -> Class:
        """Gives the class the ``repr``; returns the class."""

        def __repr__(self: object) -> str:
            parts = []
            for label, path in shown.items():
                try:
                    parts.append(f"{label}={_in_short(attrgetter(path)(self))}")
                except AttributeError:  # the constructor has not set it yet
                    continue
            line = f"<{' '.join([type(self).__name__, ', '.join(parts)]).rstrip()}>"
            return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..>"

        cls.__repr__ = __repr__  # type: ignore[method-assign, assignment, unused-ignore]
        return cls

    return add_repr


def _in_short(value: object) -> str:
    """Returns a value as a short text: in full, or else its beginning, size or type."""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value) if isinstance(value, PurePath) else repr(value)
    if len(text) <= _LONGEST_VALUE and "\n" not in text and " object at 0x" not in text:
        return text
    if isinstance(value, Collection) and not isinstance(value, str):
        return f"<{len(value)}>"
    return f"{text[:_LONGEST_VALUE]}.." if isinstance(value, str) else type(value).__name__


def table(rows: Sequence[Sequence[str]], left: Collection[int] = ()) -> str:
    """Returns rows of cells as aligned lines of text.

    Args:
        rows: The cells of each row.
        left: The indices of the columns that are aligned to the left; others, to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    )
