"""Replaces ``paddle.distributed.fleet.meta_parallel``: fleetpipe's pipeline in place of Paddle's.

The table of ``overlay`` defines its submodules; this package is a file, so that editors and type
checkers find its names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddle.distributed.fleet import meta_parallel as _paddles

from fleetpipe.dygraph import (
    DualPipeVParallel,
    NoPipelineParallel,
    PipelineLayer,
    PipelineParallel,
    PipelineParallelWithInterleave,
    PipelineParallelWithInterleaveFthenB,
    VPPFhenBInBalancedMemory,
)
from fleetpipe.fleet import overlay
from fleetpipe.fleet.meta_parallel._descriptions import (
    LayerDesc,
    LocalSharedLayerDesc,
    SharedLayerDesc,
)
from fleetpipe.paddle_api.meta_parallel import (
    PipelineDatasetPreprocessor,
    PipelineParallelMicroStepLocations,
    register_global_pipeline_parallel_hook,
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

if TYPE_CHECKING:
    from fleetpipe.dygraph.tensor_parallel import ColumnParallelLinear as ColumnParallelLinear
    from fleetpipe.dygraph.tensor_parallel import ParallelCrossEntropy as ParallelCrossEntropy
    from fleetpipe.dygraph.tensor_parallel import RowParallelLinear as RowParallelLinear
    from fleetpipe.dygraph.tensor_parallel import TensorParallel as TensorParallel
    from fleetpipe.dygraph.tensor_parallel import VocabParallelEmbedding as VocabParallelEmbedding

    # Paddle's names for a type checker; at run time ``__getattr__`` gets them from Paddle's module.
    # fmt: off
    # isort: off
    from paddle.distributed.fleet.layers.mpu.random import (
        RNGStatesTracker as RNGStatesTracker, get_rng_state_tracker as get_rng_state_tracker,
        model_parallel_random_seed as model_parallel_random_seed,
    )
    from paddle.distributed.fleet.meta_parallel import (
        meta_parallel_base as meta_parallel_base, pipeline_hooks as pipeline_hooks,
        pp_utils as pp_utils, segment_parallel as segment_parallel,
        sharding_parallel as sharding_parallel, zero_bubble_utils as zero_bubble_utils,
    )
    from paddle.distributed.fleet.meta_parallel.parallel_layers.spec_utils import (
        LayerSpec as LayerSpec, build_spec_layer as build_spec_layer,
        get_spec_layer as get_spec_layer, import_spec_layer as import_spec_layer,
    )
    from paddle.distributed.fleet.meta_parallel.pp_utils.forward_backward_overlap_utils import (
        ScheduleChunk as ScheduleChunk, ScheduleNode as ScheduleNode,
    )
    # isort: on
    # fmt: on
    MetaParallelBase = meta_parallel_base.MetaParallelBase
    SegmentParallel = segment_parallel.SegmentParallel
    ShardingParallel = sharding_parallel.ShardingParallel
    dict_to_tuple_helper: Any
    #: Made by ``overlay``: import their classes from the package where you check types.
    dualpipev: Any
    parallel_layers: Any
    pipeline_parallel: Any
    sharding: Any
    tensor_parallel: Any
else:
    _layers = overlay.OVERLAYS["layers.mpu.mp_layers"]
    _tensor_parallel = overlay.OVERLAYS["meta_parallel.tensor_parallel"]
    __getattr__, __dir__ = overlay.module_over(globals(), _paddles, {**_layers, **_tensor_parallel})
