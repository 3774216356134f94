"""Tensor parallelism in dynamic graph: Paddle's own layers on GPU, fleetpipe's on CPU.

On CPU Paddle's layers have no kernels. Its random-state tracker works on both (2.6.2 and 3.3.1).
"""

from __future__ import annotations

from types import ModuleType

from paddle.distributed.fleet import meta_parallel
from paddle.distributed.fleet.layers import mpu

from fleetpipe.aliases import Layer
from fleetpipe.dygraph.tensor_parallel import cross_entropy, embedding, linear, sequence, wrapper
from fleetpipe.dygraph.tensor_parallel.dropout import dropout
from fleetpipe.dygraph.tensor_parallel.groups import (
    alone,
    connect,
    disconnect,
    model_parallel_group,
)
from fleetpipe.dygraph.tensor_parallel.layer import (
    own_value,
    refuse_shards,
    shard_in,
    share_of,
    whole_shape,
    whole_value,
)
from fleetpipe.dygraph.tensor_parallel.operations import own_errors, parallel_matmul, shard_of
from fleetpipe.dygraph.tensor_parallel.replacements import (
    OPERATIONS,
    connect_shards,
    install,
    uninstall,
)
from fleetpipe.dygraph.tensor_parallel.sequence import is_sequence_parallel_parameter, marked
from fleetpipe.dygraph.tensor_parallel.wrapper import share_whole_state, share_with_shards
from fleetpipe.mesh.parts import split_axis
from fleetpipe.paddle_api.device import device_kind
from fleetpipe.paddle_api.meta_parallel import SEQUENCE_PARALLEL

_layers: ModuleType = mpu
_wrappers: ModuleType = meta_parallel
_on_gpu = device_kind() != "cpu"

RNGStatesTracker = _layers.RNGStatesTracker
get_rng_state_tracker = _layers.get_rng_state_tracker
model_parallel_random_seed = _layers.model_parallel_random_seed
ColumnParallelLinear: type[Layer] = (_layers if _on_gpu else linear).ColumnParallelLinear
RowParallelLinear: type[Layer] = (_layers if _on_gpu else linear).RowParallelLinear
VocabParallelEmbedding: type[Layer] = (_layers if _on_gpu else embedding).VocabParallelEmbedding
ParallelCrossEntropy: type[Layer] = (_layers if _on_gpu else cross_entropy).ParallelCrossEntropy
TensorParallel: type[Layer] = (_wrappers if _on_gpu else wrapper).TensorParallel

#: The module that gives Fleet's names of sequence parallelism.
sequence_parallel_utils: ModuleType = SEQUENCE_PARALLEL if _on_gpu else sequence

__all__ = [
    "OPERATIONS",
    "ColumnParallelLinear",
    "ParallelCrossEntropy",
    "RNGStatesTracker",
    "RowParallelLinear",
    "TensorParallel",
    "VocabParallelEmbedding",
    "alone",
    "connect",
    "connect_shards",
    "disconnect",
    "dropout",
    "get_rng_state_tracker",
    "install",
    "is_sequence_parallel_parameter",
    "marked",
    "model_parallel_group",
    "model_parallel_random_seed",
    "own_errors",
    "own_value",
    "parallel_matmul",
    "refuse_shards",
    "sequence_parallel_utils",
    "shard_in",
    "share_of",
    "share_whole_state",
    "share_with_shards",
    "shard_of",
    "split_axis",
    "uninstall",
    "whole_shape",
    "whole_value",
]
