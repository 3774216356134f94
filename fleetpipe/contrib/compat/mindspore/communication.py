"""``communication``: begins the job, and tells this process's rank in it."""

from __future__ import annotations

from fleetpipe.contrib.compat.mindspore.context import get_group_size, get_rank, init

__all__ = ["get_group_size", "get_rank", "init"]
