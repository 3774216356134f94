"""Whether a forward runs to be captured, and not for a batch: then no output is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_trial = ContextVar("trial", default=False)


@contextmanager
def trial() -> Iterator[None]:
    """While it is open, forwards of this thread are no part of a batch."""
    token = _trial.set(True)
    try:
        yield
    finally:
        _trial.reset(token)


def is_trial() -> bool:
    """Whether :func:`trial` is open."""
    return _trial.get()
