"""Edges between ranks: one interface over memory, sockets and Paddle's process groups.

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

_HOMES = {
    "MemoryHub": "memory",
    "MemoryTransport": "memory",
    "ProcessGroupTransport": "process_group",
    "SocketTransport": "sockets",
    "connect": "sockets",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


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
