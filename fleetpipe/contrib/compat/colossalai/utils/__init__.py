"""``colossalai.utils``: the loader and the timers of its tutorials."""

from __future__ import annotations

from fleetpipe.contrib.compat.colossalai.utils.data import get_dataloader
from fleetpipe.contrib.compat.colossalai.utils.timer import MultiTimer, Timer

__all__ = ["MultiTimer", "Timer", "get_dataloader"]
