"""Tells the user what is no error but should be known: one line, once."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fleetpipe.job import meeting


@functools.cache
def tell_once(text: str, any_rank: bool = False) -> None:
    """Writes ``text`` to stderr the first time that it is told in this process.

    Args:
        text: The line.
        any_rank: Whether it is news of this rank alone; else rank 0 writes it for all.
    """
    if any_rank or meeting.own_rank() == 0:
        sys.stderr.write(f"fleetpipe: {text}\n")


#: After so many seconds a user wants to know what takes long.
_PATIENCE = 3.0


@contextmanager
def told_if_slow(text: str) -> Iterator[None]:
    """Within it :func:`tell_once` writes ``text`` after a few seconds, unless it has ended."""
    timer = threading.Timer(_PATIENCE, tell_once, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
