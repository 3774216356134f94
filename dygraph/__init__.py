"""Pipelines in dynamic graph: the layer list, its stages, and the wrapper that trains them."""

from __future__ import annotations

# First, because it says which package to install where there is no Paddle.
from fleetpipe import _paddle as _paddle
from fleetpipe.dygraph._paddle import twin_optimizer
from fleetpipe.dygraph.optimizer import PipelineOptimizer, refuse_partial_norm
from fleetpipe.dygraph.pipeline_layer import PipelineLayer
from fleetpipe.dygraph.pipeline_parallel import PipelineParallel
from fleetpipe.dygraph.stage import weighted
from fleetpipe.dygraph.values import tensors_of

__all__ = [
    "PipelineLayer",
    "PipelineOptimizer",
    "PipelineParallel",
    "refuse_partial_norm",
    "tensors_of",
    "twin_optimizer",
    "weighted",
]
