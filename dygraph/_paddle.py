"""The private names of Paddle's dynamic graph, for paddlepaddle 2.6.2 and 3.3.x."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from paddle.base import core

from fleetpipe._paddle import paddle


def gradient_clip(optimizer: Any) -> Any:
    """Returns the optimizer's gradient clip, or None."""
    return getattr(optimizer, "_grad_clip", None)


def twin_optimizer(optimizer: Any, parameters: Mapping[str, Any], others: Mapping[str, Any]) -> Any:
    """Returns an optimizer like ``optimizer`` over other parameters, with the same learning rate.

    Groups, decay and clipping carry over, accumulated state does not belong to it yet: the twin is
    to be made before the first step. Where the learning rate is a scheduler both share it.

    Args:
        optimizer: A Paddle optimizer over ``parameters``.
        parameters: Parameters by name.
        others: The parameters to put in their place, by the same names.
    """
    memo = {id(parameter): others[name] for name, parameter in parameters.items()}
    rate = optimizer._learning_rate
    if isinstance(rate, paddle.optimizer.lr.LRScheduler):
        memo[id(rate)] = rate
    return copy.deepcopy(optimizer, memo)


def allocated_bytes() -> int:
    """Returns how many bytes of tensors are alive on the current device."""
    if paddle.device.get_device().startswith("gpu"):
        return int(paddle.device.cuda.memory_allocated())
    return int(core.host_memory_stat_current_value("Allocated", 0))
