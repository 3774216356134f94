"""``colossalai.nn``, as far as its tutorials use it: the learning rate and the accuracy."""

from __future__ import annotations

from fleetpipe.contrib.compat.colossalai.nn import lr_scheduler, metric

__all__ = ["lr_scheduler", "metric"]
