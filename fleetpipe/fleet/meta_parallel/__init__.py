"""``paddle.distributed.fleet.meta_parallel`` with fleetpipe's pipeline in the place of Paddle's.

A file of its own, where the modules below it are made from ``overlay``'s table: editors and type
checkers look here.
"""

from __future__ import annotations

from paddle.distributed.fleet import meta_parallel as _theirs

from fleetpipe.dygraph import (
    DualPipeVParallel,
    NoPipelineParallel,
    PipelineLayer,
    PipelineParallel,
    PipelineParallelWithInterleave,
    PipelineParallelWithInterleaveFthenB,
    VPPFhenBInBalancedMemory,
)
from fleetpipe.dygraph.backports import (
    PipelineDatasetPreprocessor,
    PipelineParallelMicroStepLocations,
    register_global_pipeline_parallel_hook,
)
from fleetpipe.dygraph.tensor_parallel import (
    ColumnParallelLinear,
    ParallelCrossEntropy,
    RowParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
)
from fleetpipe.fleet import overlay
from fleetpipe.fleet.meta_parallel._descriptions import (
    LayerDesc,
    LocalSharedLayerDesc,
    SharedLayerDesc,
)

__all__ = [
    "ColumnParallelLinear",
    "DualPipeVParallel",
    "LayerDesc",
    "LocalSharedLayerDesc",
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

__getattr__, __dir__ = overlay.over(globals(), _theirs)
