"""``colossalai.core``: ``global_context``, which programs call ``gpc``."""

from __future__ import annotations

from fleetpipe.contrib.compat.colossalai.context import gpc as global_context

__all__ = ["global_context"]
