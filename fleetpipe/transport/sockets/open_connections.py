"""Ends the connections of a process that ends, or that is a forked copy of another.

A forked child's copy, as in a data loader's worker, would keep a connection open after its parent's
death, so that the peers would not notice it.
"""

from __future__ import annotations

import atexit
import sys
import weakref
from typing import Protocol

from fleetpipe import systems


class Abandoned(Protocol):
    """An object that holds connections."""

    def abandon(self) -> None:
        """Closes this process's copies of the sockets after a fork; the parent's stay open."""


class Closed(Protocol):
    """An object whose peers are told when it is closed."""

    def close(self, reason: str = "") -> None:
        """Ends the connections; with a reason, the peers learn of a failure."""


#: Whatever of this process has connections that are open.
holding: weakref.WeakSet[Abandoned] = weakref.WeakSet()

#: What is closed when the process ends, unless its job was ended before.
closed_at_exit: weakref.WeakSet[Closed] = weakref.WeakSet()


def _abandon_all() -> None:
    for one in list(holding):
        one.abandon()


def _close_all() -> None:
    """Closes all transports at exit: messages leave, and peers learn why this rank ended."""
    error = getattr(sys, "last_value", None)
    reason = f"{type(error).__name__}: {error}" if error is not None else ""
    for transport in list(closed_at_exit):
        transport.close(reason)


systems.call_in_forked_child(_abandon_all)
# This module is loaded before the one that ends a job at exit, so that the job is ended first.
atexit.register(_close_all)
