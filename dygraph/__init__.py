"""Pipelines in dynamic graph: the layer list, its stages, and the wrapper that trains them."""

from __future__ import annotations

# First, because it says which package to install where there is no Paddle.
from fleetpipe import _paddle as _paddle
from fleetpipe.dygraph._paddle import has_memory, learning_rate_of, state_slots, twin_optimizer
from fleetpipe.dygraph.crossings import Crossing, reordered
from fleetpipe.dygraph.fake_micro_dataset import FakeMicroDataset
from fleetpipe.dygraph.losses import weighted
from fleetpipe.dygraph.optimizer import PipelineOptimizer
from fleetpipe.dygraph.pipeline_layer import PipelineLayer
from fleetpipe.dygraph.pipeline_parallel import PipelineParallel
from fleetpipe.dygraph.single_model import SingleModel
from fleetpipe.dygraph.values import tensors_of
from fleetpipe.dygraph.wrappers import (
    DualPipeVParallel,
    NoPipelineParallel,
    PipelineParallelWithInterleave,
    PipelineParallelWithInterleaveFthenB,
    VPPFhenBInBalancedMemory,
    wrap,
)

__all__ = [
    "Crossing",
    "DualPipeVParallel",
    "FakeMicroDataset",
    "NoPipelineParallel",
    "PipelineParallelWithInterleave",
    "PipelineParallelWithInterleaveFthenB",
    "VPPFhenBInBalancedMemory",
    "PipelineLayer",
    "PipelineOptimizer",
    "PipelineParallel",
    "SingleModel",
    "has_memory",
    "learning_rate_of",
    "reordered",
    "state_slots",
    "tensors_of",
    "twin_optimizer",
    "weighted",
    "wrap",
]
