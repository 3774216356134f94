"""``colossalai.trainer``: runs epochs with hooks around them, by ``fleetpipe.Model.fit``."""

from __future__ import annotations

from fleetpipe.contrib.compat.colossalai.trainer import hooks
from fleetpipe.contrib.compat.colossalai.trainer.hooks import Trainer

__all__ = ["Trainer", "hooks"]
