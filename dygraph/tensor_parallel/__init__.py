"""Tensor parallelism in dynamic graph: Paddle's own layers on GPU, fleetpipe's on CPU.

On CPU Paddle's layers have no kernels. Paddle's random-state tracker works on both devices (2.6.2
and 3.3.1). Start with ``layer.py``, the base of the layers, and ``operations.py``. A member is a
rank that holds a shard of a layer.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from paddle.distributed.fleet import meta_parallel
from paddle.distributed.fleet.layers import mpu

from fleetpipe.aliases import Layer
from fleetpipe.dygraph.tensor_parallel.groups import (
    alone,
    connect,
    disconnect,
    model_parallel_group,
)
from fleetpipe.dygraph.tensor_parallel.layer import (
    marked,
    own_value,
    refuse_shards,
    shard_in,
    share_of,
    whole_shape,
    whole_value,
)
from fleetpipe.dygraph.tensor_parallel.operations import (
    dropout,
    own_errors,
    parallel_matmul,
    shard_of,
)
from fleetpipe.extras import late
from fleetpipe.mesh.parts import split_axis
from fleetpipe.paddle_api.device import device_kind
from fleetpipe.paddle_api.meta_parallel import SEQUENCE_PARALLEL

_layers: ModuleType = mpu

RNGStatesTracker = _layers.RNGStatesTracker
get_rng_state_tracker = _layers.get_rng_state_tracker
model_parallel_random_seed = _layers.model_parallel_random_seed
is_sequence_parallel_parameter = SEQUENCE_PARALLEL.is_sequence_parallel_parameter

if TYPE_CHECKING:
    from fleetpipe.dygraph.tensor_parallel.replacements import OPERATIONS as OPERATIONS
    from fleetpipe.dygraph.tensor_parallel.replacements import connect_shards as connect_shards
    from fleetpipe.dygraph.tensor_parallel.replacements import install as install
    from fleetpipe.dygraph.tensor_parallel.replacements import uninstall as uninstall
    from fleetpipe.dygraph.tensor_parallel.wrapper import share_whole_state as share_whole_state
    from fleetpipe.dygraph.tensor_parallel.wrapper import share_with_shards as share_with_shards

    ColumnParallelLinear: type[Layer]
    RowParallelLinear: type[Layer]
    VocabParallelEmbedding: type[Layer]
    ParallelCrossEntropy: type[Layer]
    TensorParallel: type[Layer]
    #: The module with Fleet's names of sequence parallelism.
    sequence_parallel_utils: ModuleType
else:
    #: Names that are loaded late, by module: they have few users, or no use on a GPU.
    _LATE = {
        "replacements": ("OPERATIONS", "connect_shards", "install", "uninstall"),
        "wrapper": ("TensorParallel", "share_whole_state", "share_with_shards"),
        "linear_and_embedding": (
            "ColumnParallelLinear",
            "RowParallelLinear",
            "VocabParallelEmbedding",
        ),
        "cross_entropy": ("ParallelCrossEntropy",),
        "sequence": ("sequence_parallel_utils",),
    }
    __getattr__ = late(
        {name: f"{__name__}.{module}" for module, names in _LATE.items() for name in names}
    )
    if device_kind() != "cpu":
        TensorParallel = meta_parallel.TensorParallel
        sequence_parallel_utils = SEQUENCE_PARALLEL
        for _module in ("linear_and_embedding", "cross_entropy"):
            globals().update({name: getattr(mpu, name) for name in _LATE[_module]})

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


def __dir__() -> list[str]:
    """Returns the names of the package, including those that are loaded late."""
    return sorted({*globals(), *__all__})
