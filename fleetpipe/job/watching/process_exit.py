"""Finds out why this process ends, so that the other ranks can be told."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any, NoReturn

from fleetpipe.job.watching.watch import EXIT_CODE

_exit: SystemExit | None = None


def note_exits() -> None:
    """Makes ``sys.exit`` remember each call with a status that means failure.

    Python does not report a ``SystemExit`` that ends a process: no hook is called, and it is gone
    when the exit functions run.
    """
    if hasattr(sys.exit, "__wrapped__"):
        return
    original = sys.exit

    @functools.wraps(original)
    def exit_with(status: Any = None, /) -> None:
        global _exit
        try:
            original(status)
        except SystemExit as error:
            _exit = error if status else None
            raise

    sys.exit = exit_with  # type: ignore[assignment]


def error() -> BaseException | None:
    """Returns the error that ends this process: an uncaught one, or a failing sys.exit."""
    uncaught: BaseException | None = getattr(sys, "last_value", None)
    return uncaught if uncaught is not None else _exit


def end_with(error: BaseException) -> NoReturn:
    """Ends the process at once, with ``error`` in its log, if no exception could."""
    try:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.stderr.flush()
        sys.stdout.flush()
    finally:  # whoever reads may be gone
        os._exit(EXIT_CODE)
