"""MindSpore's package of this name: ``Model``, and the callbacks that it calls."""

from __future__ import annotations

from fleetpipe.contrib.compat.mindspore.model import Model
from fleetpipe.contrib.compat.mindspore.train import callback

__all__ = ["Model", "callback"]
