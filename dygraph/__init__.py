"""Pipelines in dynamic graph: the layer list, its stages, and the wrapper that trains them."""

from __future__ import annotations

from typing import TYPE_CHECKING

# First, because it says which package to install where there is no Paddle.
from fleetpipe import paddle_api as paddle_api
from fleetpipe.dygraph.backward.added_gradients import Crossing, reordered
from fleetpipe.dygraph.batch.losses import weighted
from fleetpipe.dygraph.batch.micro_batches import FakeMicroDataset
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
from fleetpipe.extras import late

if TYPE_CHECKING:
    from fleetpipe.contrib.vocabulary import VocabularyEmbedding as VocabularyEmbedding
    from fleetpipe.contrib.vocabulary import VocabularyHead as VocabularyHead
    from fleetpipe.contrib.vocabulary import VocabularyLoss as VocabularyLoss
    from fleetpipe.contrib.vocabulary import vocabulary_cross_entropy as vocabulary_cross_entropy
else:
    _NAMES = ("VocabularyEmbedding", "VocabularyHead", "VocabularyLoss", "vocabulary_cross_entropy")
    __getattr__ = late(
        {
            **dict.fromkeys(_NAMES, "fleetpipe.contrib.vocabulary"),
            **{name: f"fleetpipe.contrib.{name}" for name in ("experts", "sequences", "slices")},
        }
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
