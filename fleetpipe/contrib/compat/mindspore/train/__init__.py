"""MindSpore's package of this name: ``Model``, and ``callback`` with what it calls meanwhile."""

from __future__ import annotations

from fleetpipe.contrib.compat.mindspore.model import Model
from fleetpipe.contrib.compat.mindspore.train import callback

__all__ = ["Model", "callback"]
