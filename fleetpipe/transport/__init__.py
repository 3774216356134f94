"""Sends values between ranks: one interface over memory, sockets and Paddle's process groups.

Names that need Paddle are loaded when first used, so that the interface is importable without.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fleetpipe.transport.base import Store, Transport, Value, View
from fleetpipe.transport.wire.structure import MessageKey, describe

if TYPE_CHECKING:
    from fleetpipe.transport.memory import MemoryHub, MemoryTransport
    from fleetpipe.transport.process_group import ProcessGroupTransport
    from fleetpipe.transport.sockets import SocketTransport, connect

#: For each name that is loaded when first used, its module in this package.
_LATE_MODULES = {
    "MemoryHub": "memory",
    "MemoryTransport": "memory",
    "ProcessGroupTransport": "process_group",
    "SocketTransport": "sockets",
    "connect": "sockets",
}


def __getattr__(name: str) -> Any:
    """Loads a name of ``_LATE_MODULES`` when it is first used."""
    if name not in _LATE_MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATE_MODULES[name]}"), name)


__all__ = [
    "MemoryHub",
    "MemoryTransport",
    "MessageKey",
    "ProcessGroupTransport",
    "SocketTransport",
    "Store",
    "Transport",
    "Value",
    "View",
    "connect",
    "describe",
]
