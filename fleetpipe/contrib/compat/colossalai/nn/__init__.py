"""``colossalai.nn``: the learning rate and the accuracy that its tutorials use."""

from __future__ import annotations

from fleetpipe.contrib.compat.colossalai.nn import lr_scheduler, metric

__all__ = ["lr_scheduler", "metric"]
