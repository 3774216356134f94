"""What a forked child (a data loader's worker) drops: its copies of its parent's connections.

A copy would keep a connection open after the parent's death, which the peers then would not see.
"""

from __future__ import annotations

import weakref
from typing import Protocol

from fleetpipe import systems


class Abandoned(Protocol):
    """What holds connections."""

    def abandon(self) -> None:
        """Drops this process's copies of the sockets after a fork; the parent's stay open."""


#: Whatever of this process has connections that are open.
holding: weakref.WeakSet[Abandoned] = weakref.WeakSet()


def _abandon_all() -> None:
    for one in list(holding):
        one.abandon()


systems.call_in_forked_child(_abandon_all)
