"""Loads static graph at a script's first ``device_guard``, or by ``fleet.init``."""

from __future__ import annotations

import importlib
from typing import Any

from fleetpipe.paddle_api.static import swap_switch_device, switch_device


def static_graph() -> Any:
    """Loads and returns ``fleetpipe.static``."""
    return importlib.import_module("fleetpipe.static")


class _FirstGuard:
    """Changes Paddle for static graph when a script first enters a ``device_guard``."""

    def __init__(self) -> None:
        self.awaited = True
        self._original = swap_switch_device(self)

    def __call__(self, device: str | None) -> object:
        if not self.awaited:
            return self._original(device)
        self.awaited = False
        static_graph().install()
        return switch_device(device)


_guard: _FirstGuard | None = None


def await_guard() -> None:
    """Makes the next ``device_guard`` load static graph; ``fleet.shutdown`` undoes that."""
    global _guard
    if _guard is None:
        _guard = _FirstGuard()
    _guard.awaited = True
