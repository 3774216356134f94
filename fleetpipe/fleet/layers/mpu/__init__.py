"""``fleet.layers.mpu`` with tensor-parallel layers that run on CPU in the place of Paddle's."""

from __future__ import annotations

from typing import Any

from paddle.distributed.fleet.layers import mpu as _theirs

from fleetpipe.fleet.layers.mpu import mp_layers, mp_ops
from fleetpipe.fleet.layers.mpu.mp_layers import (
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
    "mp_layers",
    "mp_ops",
]


def __getattr__(name: str) -> Any:
    """Returns Paddle's object of that name."""
    return getattr(_theirs, name)


def __dir__() -> list[str]:
    """Lists fleetpipe's names and Paddle's."""
    return sorted({*globals(), *dir(_theirs)})
