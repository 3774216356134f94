"""Keeps the replicas of a pipeline alike: parameters at the start, gradients at every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paddle.distributed.fleet.utils import hybrid_parallel_util

from fleetpipe._paddle import paddle
from fleetpipe.errors import ConfigError
from fleetpipe.transport import GlooGroup, Group

#: What ``gradient_scale_configs`` may say of the gradients of the replicas.
SCALES = ("avg", "sum")


def broadcast_state(state: dict[str, Any], group: Group) -> None:
    """Gives every replica the parameters and buffers of the first. Collective over the replicas."""
    if group.ranks == 1:
        return
    first = group.broadcast({name: tensor.detach() for name, tensor in state.items()}, 0)
    if group.rank:
        for name, tensor in state.items():
            tensor.set_value(first[name])


def reduce_gradients(parameters: Sequence[Any], group: Group, scale: str) -> None:
    """Averages or sums the gradients of the replicas, fused. Collective over the replicas.

    A parameter that had no gradient on some replica counts as zero there.

    Args:
        parameters: This rank's parameters, the same on every replica.
        group: The replicas.
        scale: "avg" or "sum".
    """
    if not isinstance(group, GlooGroup):
        return
    present = [p.grad is not None for p in parameters]
    # One call that also makes sure that all replicas are here before Gloo's 30 s begin.
    everywhere = group.all_gather("".join("01"[flag] for flag in present))
    for index, parameter in enumerate(parameters):
        if not present[index] and any(flags[index] == "1" for flags in everywhere):
            parameter.grad = paddle.zeros_like(parameter)
    fused: Any = hybrid_parallel_util.fused_allreduce_gradients_with_group
    with group.collective():
        fused(parameters, group.paddle_group, scale=1.0 / group.ranks if scale == "avg" else 1.0)


def mean_loss(loss: Any, group: Group) -> Any:
    """Returns the mean of the replicas' losses, the same bits on each. Collective over these."""
    if group.ranks == 1:
        return loss
    first, *others = group.all_gather(loss)
    for other in others:
        first = first + other
    return first / group.ranks


def scale_strategy(strategy: Any) -> str:
    """Reads ``gradient_scale_configs`` of a strategy.

    Raises:
        ConfigError: It asks for neither the mean nor the sum.
    """
    scale = str(strategy.gradient_scale_configs["scale_strategy"])
    if scale not in SCALES:
        raise ConfigError(
            "gradient_scale_configs['scale_strategy'] is 'avg' or 'sum' here",
            got=repr(scale),
            fix="scale the loss in loss_fn for anything else",
        )
    return scale
