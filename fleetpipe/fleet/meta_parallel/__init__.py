"""``paddle.distributed.fleet.meta_parallel`` with fleetpipe's pipeline in the place of Paddle's."""

from __future__ import annotations

from typing import Any

from paddle.distributed.fleet import meta_parallel as _theirs

from fleetpipe.dygraph import PipelineLayer, PipelineParallel

__all__ = ["PipelineLayer", "PipelineParallel"]


def __getattr__(name: str) -> Any:
    """Returns Paddle's object of that name."""
    return getattr(_theirs, name)


def __dir__() -> list[str]:
    """Lists fleetpipe's names and Paddle's."""
    return sorted({*globals(), *dir(_theirs)})
