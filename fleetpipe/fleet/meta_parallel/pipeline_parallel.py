"""``meta_parallel.pipeline_parallel`` with fleetpipe's wrappers, hooks and data sets."""

from __future__ import annotations

from typing import Any

from paddle.distributed.fleet.meta_parallel import pipeline_parallel as _theirs

from fleetpipe.dygraph import (
    DualPipeVParallel,
    FakeMicroDataset,
    NoPipelineParallel,
    PipelineLayer,
    PipelineParallel,
    PipelineParallelWithInterleave,
    PipelineParallelWithInterleaveFthenB,
    VPPFhenBInBalancedMemory,
)
from fleetpipe.dygraph.backports import (
    PipelineDatasetPreprocessor,
    PipelineParallelMicroStepCallback,
    PipelineParallelMicroStepLocations,
    pipeline_parallel_callbacks_,
    register_global_pipeline_parallel_hook,
)

__all__ = [
    "DualPipeVParallel",
    "FakeMicroDataset",
    "NoPipelineParallel",
    "PipelineDatasetPreprocessor",
    "PipelineLayer",
    "PipelineParallel",
    "PipelineParallelMicroStepCallback",
    "PipelineParallelMicroStepLocations",
    "PipelineParallelWithInterleave",
    "PipelineParallelWithInterleaveFthenB",
    "VPPFhenBInBalancedMemory",
    "pipeline_parallel_callbacks_",
    "register_global_pipeline_parallel_hook",
]


def __getattr__(name: str) -> Any:
    """Returns Paddle's object of that name."""
    return getattr(_theirs, name)


def __dir__() -> list[str]:
    """Lists fleetpipe's names and Paddle's."""
    return sorted({*globals(), *dir(_theirs)})
