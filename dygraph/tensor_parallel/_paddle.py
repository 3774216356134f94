"""The private names of Paddle that tensor-parallel layers need, for 2.6.2 and 3.3.x."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import ModuleType

from paddle.base import initializer as _defaults
from paddle.base.param_attr import ParamAttr
from paddle.distributed import collective as _collective
from paddle.distributed.communication.group import Group as Group
from paddle.distributed.fleet.base import topology as _topology
from paddle.distributed.fleet.layers.mpu import mp_ops as _operations

from fleetpipe.aliases import Attribute, PaddleGroup, Tensor, Topology
from fleetpipe.paddle_api import paddle

_any_topology: ModuleType = _topology
_any_defaults: ModuleType = _defaults
_any_initializers: ModuleType = paddle.nn.initializer
Initializer = _any_initializers.Initializer
#: The modules from which scripts take the operations of tensor-parallel layers.
OPERATION_MODULES: tuple[ModuleType, ...] = (_operations, _collective)


def hybrid_topology() -> Topology:
    """Returns the ``HybridCommunicateGroup`` of Paddle's last ``fleet.init``, else None."""
    return _any_topology._HYBRID_PARALLEL_GROUP


def sole_group() -> PaddleGroup:
    """Returns a group of Paddle's whose one member is this process."""
    return Group(0, 0, [0])


def attribute(given: Attribute) -> Attribute:
    """Returns ``weight_attr`` as a ``ParamAttr`` with the initializer that Paddle would use."""
    copied: Attribute = copy.copy(ParamAttr._to_attr(given))
    if copied and copied.initializer is None:
        usual = _any_defaults._global_weight_initializer()
        copied.initializer = usual or paddle.nn.initializer.XavierUniform()
    return copied


def assigned_shape(initializer: object) -> list[int] | None:
    """Returns the shape of the value that an ``Assign`` holds; None for any other initializer."""
    if not isinstance(initializer, paddle.nn.initializer.Assign):
        return None
    assign: Attribute = initializer
    return list(assign._value.shape)


def give_memory(source: Tensor, parameter: Tensor) -> None:
    """Makes ``parameter``, which has no memory yet, hold what ``source`` holds, without a copy."""
    source._share_underline_tensor_to(parameter)


def sharded(
    state: Mapping[str, Tensor], axes: Mapping[str, int], group: PaddleGroup, prefix: str
) -> dict[str, Tensor]:
    """Returns 3.3's ``ShardedWeight`` of each tensor, of which those in ``axes`` are slices."""
    from paddle.distributed.flex_checkpoint.dcp import sharded_weight

    shards: ModuleType = sharded_weight
    weights: dict[str, Tensor] = {}
    for name, tensor in state.items():
        key = f"{prefix}{name}"
        if name in axes:
            weights[key] = shards.shard_weight(key, tensor, axes[name], group)
        else:
            weights[key] = shards.make_replicated_sharded_weight(key, tensor)
    return weights
