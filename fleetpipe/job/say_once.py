"""Tells the user what is no error but should be known: one line, once."""

from __future__ import annotations

import functools
import sys

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
