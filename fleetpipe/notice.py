"""Tells the user what is no error but should be known: one line, once, from rank 0."""

from __future__ import annotations

import functools
import sys

from fleetpipe import arrival


@functools.cache
def tell_once(text: str) -> None:
    """Writes ``text`` to stderr the first time that it is told in this process."""
    if arrival.own_rank() == 0:
        sys.stderr.write(f"fleetpipe: {text}\n")
