"""``meta_parallel.pipeline_parallel`` with fleetpipe's ``PipelineParallel``."""

from __future__ import annotations

from typing import Any

from paddle.distributed.fleet.meta_parallel import pipeline_parallel as _theirs

from fleetpipe.dygraph import PipelineParallel

__all__ = ["PipelineParallel"]


def __getattr__(name: str) -> Any:
    """Returns Paddle's object of that name."""
    return getattr(_theirs, name)


def __dir__() -> list[str]:
    """Lists fleetpipe's names and Paddle's."""
    return sorted({*globals(), *dir(_theirs)})
