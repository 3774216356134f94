"""Closes a forked child's copies of its parent's connections, as in a data loader's worker.

A copy would keep a connection open after the parent's death, so that the peers would not notice it.
"""

from __future__ import annotations

import weakref
from typing import Protocol

from fleetpipe import systems


class Abandoned(Protocol):
    """An object that holds connections."""

    def abandon(self) -> None:
        """Closes this process's copies of the sockets after a fork; the parent's stay open."""


#: Whatever of this process has connections that are open.
holding: weakref.WeakSet[Abandoned] = weakref.WeakSet()


def _abandon_all() -> None:
    for one in list(holding):
        one.abandon()


systems.call_in_forked_child(_abandon_all)
