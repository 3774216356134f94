"""``meta_parallel.parallel_layers`` with fleetpipe's ``PipelineLayer``."""

from __future__ import annotations

from typing import Any

from paddle.distributed.fleet.meta_parallel import parallel_layers as _theirs

from fleetpipe.dygraph import PipelineLayer
from fleetpipe.fleet.layers.mpu.mp_layers import (
    ColumnParallelLinear,
    ParallelCrossEntropy,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from fleetpipe.fleet.meta_parallel.parallel_layers import mp_layers, pp_layers

__all__ = [
    "ColumnParallelLinear",
    "ParallelCrossEntropy",
    "PipelineLayer",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "mp_layers",
    "pp_layers",
]


def __getattr__(name: str) -> Any:
    """Returns Paddle's object of that name."""
    return getattr(_theirs, name)


def __dir__() -> list[str]:
    """Lists fleetpipe's names and Paddle's."""
    return sorted({*globals(), *dir(_theirs)})
