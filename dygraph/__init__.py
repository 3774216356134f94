"""Pipelines in dynamic graph: the layer list, its stages, and the wrapper that trains them."""

from __future__ import annotations

# First, because it says which package to install where there is no Paddle.
from fleetpipe import paddle_api as paddle_api
from fleetpipe.dygraph.backward.crossings import Crossing, reordered
from fleetpipe.dygraph.batch.losses import weighted
from fleetpipe.dygraph.batch.micro_batches import FakeMicroDataset
from fleetpipe.dygraph.layers.vocabulary import VocabularyEmbedding, VocabularyHead
from fleetpipe.dygraph.layers.vocabulary_losses import VocabularyLoss, vocabulary_cross_entropy
from fleetpipe.dygraph.model.pipeline_layer import PipelineLayer
from fleetpipe.dygraph.nest import tensors_of
from fleetpipe.dygraph.optimizer.optimizer import PipelineOptimizer
from fleetpipe.dygraph.state.single_model import SingleModel
from fleetpipe.dygraph.train.pipeline_parallel import PipelineParallel
from fleetpipe.dygraph.train.wrappers import (
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
    "VocabularyEmbedding",
    "VocabularyHead",
    "VocabularyLoss",
    "reordered",
    "tensors_of",
    "vocabulary_cross_entropy",
    "weighted",
    "wrap",
]
