"""``colossalai.nn``: what its tutorials take from there, the learning rate and the accuracy."""

from __future__ import annotations

from fleetpipe.contrib.compat.colossalai.nn import lr_scheduler, metric

__all__ = ["lr_scheduler", "metric"]
