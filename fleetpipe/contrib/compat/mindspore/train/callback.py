"""``train.callback``; other callbacks are those of ``fleetpipe.callbacks``."""

from __future__ import annotations

from fleetpipe.callbacks import LossMonitor

__all__ = ["LossMonitor"]
