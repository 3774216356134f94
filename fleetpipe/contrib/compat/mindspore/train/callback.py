"""MindSpore's module of this name. Other callbacks are those of ``fleetpipe.callbacks``."""

from __future__ import annotations

from fleetpipe.callbacks import LossMonitor

__all__ = [
    "LossMonitor",
]
