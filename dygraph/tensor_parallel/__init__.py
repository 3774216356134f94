"""Tensor parallelism in dynamic graph: Paddle's own layers on GPU, fleetpipe's on CPU.

On CPU Paddle's layers have no kernels. Its random-state tracker works on both (2.6.2 and 3.3.1).
"""

from __future__ import annotations

from typing import Any

from paddle.distributed.fleet.layers import mpu

from fleetpipe.dygraph.tensor_parallel import cross_entropy, embedding, linear
from fleetpipe.dygraph.tensor_parallel._paddle import compiled_for_gpu
from fleetpipe.dygraph.tensor_parallel.groups import alone, connect, disconnect
from fleetpipe.dygraph.tensor_parallel.layer import own_value, split_axis, whole_value
from fleetpipe.dygraph.tensor_parallel.operations import own_errors

_theirs: Any = mpu
_on_gpu = compiled_for_gpu()

RNGStatesTracker: Any = _theirs.RNGStatesTracker
get_rng_state_tracker: Any = _theirs.get_rng_state_tracker
model_parallel_random_seed: Any = _theirs.model_parallel_random_seed
ColumnParallelLinear: Any = (_theirs if _on_gpu else linear).ColumnParallelLinear
RowParallelLinear: Any = (_theirs if _on_gpu else linear).RowParallelLinear
VocabParallelEmbedding: Any = (_theirs if _on_gpu else embedding).VocabParallelEmbedding
ParallelCrossEntropy: Any = (_theirs if _on_gpu else cross_entropy).ParallelCrossEntropy

__all__ = [
    "ColumnParallelLinear",
    "ParallelCrossEntropy",
    "RNGStatesTracker",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "alone",
    "connect",
    "disconnect",
    "get_rng_state_tracker",
    "model_parallel_random_seed",
    "own_errors",
    "own_value",
    "split_axis",
    "whole_value",
]
