"""``meta_parallel.parallel_layers.pp_layers`` with fleetpipe's ``PipelineLayer`` and its chunks."""

from __future__ import annotations

from typing import Any

from paddle.distributed.fleet.meta_parallel.parallel_layers import pp_layers as _theirs

from fleetpipe.dygraph import PipelineLayer
from fleetpipe.dygraph.layers.chunk import PipelineLayerChunk

__all__ = ["PipelineLayer", "PipelineLayerChunk"]


def __getattr__(name: str) -> Any:
    """Returns Paddle's object of that name."""
    return getattr(_theirs, name)


def __dir__() -> list[str]:
    """Lists fleetpipe's names and Paddle's."""
    return sorted({*globals(), *dir(_theirs)})
