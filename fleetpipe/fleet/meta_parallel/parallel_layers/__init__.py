"""``meta_parallel.parallel_layers`` with fleetpipe's ``PipelineLayer``."""

from __future__ import annotations

from typing import Any

from paddle.distributed.fleet.meta_parallel import parallel_layers as _theirs

from fleetpipe.dygraph import PipelineLayer

__all__ = ["PipelineLayer"]


def __getattr__(name: str) -> Any:
    """Returns Paddle's object of that name."""
    return getattr(_theirs, name)


def __dir__() -> list[str]:
    """Lists fleetpipe's names and Paddle's."""
    return sorted({*globals(), *dir(_theirs)})
