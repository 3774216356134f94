"""``paddle.distributed.fleet.meta_parallel`` with fleetpipe's pipeline in the place of Paddle's."""

from __future__ import annotations

from typing import Any

from paddle.distributed.fleet import meta_parallel as _theirs

from fleetpipe.dygraph import PipelineLayer
from fleetpipe.fleet.layers.mpu.mp_layers import (
    ColumnParallelLinear,
    ParallelCrossEntropy,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from fleetpipe.fleet.meta_parallel import (
    dualpipev,
    parallel_layers,
    pipeline_parallel,
    tensor_parallel,
)
from fleetpipe.fleet.meta_parallel._descriptions import LayerDesc, SharedLayerDesc
from fleetpipe.fleet.meta_parallel.pipeline_parallel import (
    DualPipeVParallel,
    NoPipelineParallel,
    PipelineDatasetPreprocessor,
    PipelineParallel,
    PipelineParallelMicroStepLocations,
    PipelineParallelWithInterleave,
    PipelineParallelWithInterleaveFthenB,
    VPPFhenBInBalancedMemory,
    register_global_pipeline_parallel_hook,
)
from fleetpipe.fleet.meta_parallel.tensor_parallel import TensorParallel

__all__ = [
    "ColumnParallelLinear",
    "DualPipeVParallel",
    "LayerDesc",
    "NoPipelineParallel",
    "ParallelCrossEntropy",
    "PipelineDatasetPreprocessor",
    "PipelineLayer",
    "PipelineParallel",
    "PipelineParallelMicroStepLocations",
    "PipelineParallelWithInterleave",
    "PipelineParallelWithInterleaveFthenB",
    "RowParallelLinear",
    "SharedLayerDesc",
    "TensorParallel",
    "VPPFhenBInBalancedMemory",
    "VocabParallelEmbedding",
    "dualpipev",
    "parallel_layers",
    "pipeline_parallel",
    "register_global_pipeline_parallel_hook",
    "tensor_parallel",
]


def __getattr__(name: str) -> Any:
    """Returns Paddle's object of that name."""
    return getattr(_theirs, name)


def __dir__() -> list[str]:
    """Lists fleetpipe's names and Paddle's."""
    return sorted({*globals(), *dir(_theirs)})
