"""``colossalai.trainer``: epochs of batches, and hooks around them, on ``fleetpipe.Model.fit``."""

from __future__ import annotations

from fleetpipe.compat.colossalai.trainer import hooks
from fleetpipe.compat.colossalai.trainer.trainer import Trainer

__all__ = ["Trainer", "hooks"]
