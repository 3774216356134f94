"""``mpu.mp_layers`` with tensor-parallel layers that run on CPU in the place of Paddle's."""

from __future__ import annotations

from typing import Any

from paddle.distributed.fleet.layers.mpu import mp_layers as _theirs

from fleetpipe.dygraph.tensor_parallel import (
    ColumnParallelLinear,
    ParallelCrossEntropy,
    RowParallelLinear,
    VocabParallelEmbedding,
)

__all__ = [
    "ColumnParallelLinear",
    "ParallelCrossEntropy",
    "RowParallelLinear",
    "VocabParallelEmbedding",
]


def __getattr__(name: str) -> Any:
    """Returns Paddle's object of that name."""
    return getattr(_theirs, name)


def __dir__() -> list[str]:
    """Lists fleetpipe's names and Paddle's."""
    return sorted({*globals(), *dir(_theirs)})
