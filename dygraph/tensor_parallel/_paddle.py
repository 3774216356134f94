"""The private names of Paddle that tensor-parallel layers need, for 2.6.2 and 3.3.x."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from paddle.base import initializer as _defaults
from paddle.base.param_attr import ParamAttr
from paddle.distributed import collective as _collective
from paddle.distributed.communication import group as _group
from paddle.distributed.fleet.base import topology as _topology
from paddle.distributed.fleet.layers.mpu import mp_ops as _operations

from fleetpipe._paddle import paddle

_any_topology: Any = _topology
_any_defaults: Any = _defaults
_any_initializers: Any = paddle.nn.initializer
Initializer: Any = _any_initializers.Initializer
PaddleGroup: Any = _group.Group
#: The modules from which scripts take the operations of tensor-parallel layers.
OPERATION_MODULES: tuple[Any, ...] = (_operations, _collective)


def compiled_for_gpu() -> bool:
    """Whether this Paddle has the GPU kernels that its own tensor-parallel layers need."""
    compiled: Any = paddle
    return bool(compiled.is_compiled_with_cuda())


def hybrid_topology() -> Any:
    """Returns the ``HybridCommunicateGroup`` of Paddle's last ``fleet.init``, else None."""
    return _any_topology._HYBRID_PARALLEL_GROUP


def sole_group() -> Any:
    """Returns a group of Paddle's whose one member is this process."""
    return PaddleGroup(0, 0, [0])


def attribute(given: Any) -> Any:
    """Returns ``weight_attr`` as a ``ParamAttr`` with the initializer that Paddle would use."""
    found: Any = copy.copy(ParamAttr._to_attr(given))
    if found and found.initializer is None:
        chosen = _any_defaults._global_weight_initializer()
        found.initializer = chosen or paddle.nn.initializer.XavierUniform()
    return found


def assigned_shape(initializer: Any) -> list[int] | None:
    """Returns the shape of the value that an ``Assign`` holds; None for any other initializer."""
    if not isinstance(initializer, paddle.nn.initializer.Assign):
        return None
    value: Any = initializer
    return list(value._value.shape)


def give_memory(source: Any, parameter: Any) -> None:
    """Makes ``parameter``, which has no memory yet, hold what ``source`` holds, without a copy."""
    source._share_underline_tensor_to(parameter)


def sharded(state: Mapping[str, Any], axes: Mapping[str, int], group: Any, prefix: str) -> Any:
    """Returns 3.3's ``ShardedWeight`` of each tensor, of which those in ``axes`` are slices."""
    from paddle.distributed.flex_checkpoint.dcp import sharded_weight

    theirs: Any = sharded_weight
    found = {}
    for name, tensor in state.items():
        key = f"{prefix}{name}"
        if name in axes:
            found[key] = theirs.shard_weight(key, tensor, axes[name], group)
        else:
            found[key] = theirs.make_replicated_sharded_weight(key, tensor)
    return found
