"""MindSpore's package of this name: ``Model``, and ``callback`` with what it calls meanwhile."""

from __future__ import annotations

from fleetpipe.compat.mindspore.model import Model
from fleetpipe.compat.mindspore.train import callback

__all__ = ["Model", "callback"]
