"""Sums over ranks before a step: tied weights, replicas, and the norm of all gradients.

Everything works on variables of a scope through dynamic tensors that share their data, in dynamic
mode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleetpipe.aliases import Optimizer, Tensor
from fleetpipe.job.job import Job
from fleetpipe.job.optimizer_table import require_clip
from fleetpipe.mesh.groups import Group
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.optimizer import gradient_clip


def add_shared(gradients: Mapping[str, Tensor], names: Sequence[str], group: Group) -> None:
    """Sums the gradients of parameters that several ranks use. Collective over the pipeline.

    Every rank gets the same bits: all add in the order of the ranks.

    Args:
        gradients: The accumulators of this rank's parameters, dynamic tensors by name.
        names: The parameters that several ranks use, the same on all.
        group: The ranks of the pipeline.
    """
    if not names or group.ranks == 1:
        return
    mine = {name: gradients[name].clone() for name in names if name in gradients}
    everyone = group.all_gather(mine)
    for name in mine:
        first, *rest = [by_name[name] for by_name in everyone if name in by_name]
        for other in rest:
            first = first + other
        paddle.assign(first, gradients[name])


def add_replicas(gradients: Mapping[str, Tensor], replicas: Group) -> None:
    """Sums the gradients of all replicas. Collective over the replicas."""
    if replicas.ranks > 1:
        replicas.all_reduce([gradients[name] for name in sorted(gradients)])


def global_norm(optimizer: Optimizer, job: Job) -> float | None:
    """Returns the limit of an optimizer's global-norm clip; None without such a clip.

    Raises:
        ConfigError: The clip is not known to be right over several processes.
    """
    clip = gradient_clip(optimizer)
    tried = require_clip(clip, job)
    if not tried or not isinstance(clip, paddle.nn.ClipGradByGlobalNorm):
        return None
    return float(clip.clip_norm)


def gradient_norm(gradients: Mapping[str, Tensor], owned: Sequence[str], group: Group) -> Tensor:
    """Returns the norm of the gradients of all ranks, float32 of shape [1]. Collective.

    Each gradient counts once, on the rank that owns its parameter, and the squares are added up in
    the order of the names, as Paddle does.

    Args:
        gradients: Gradients of this rank's parameters, dynamic tensors by name.
        owned: The names of the gradients that count on this rank.
        group: The ranks of the pipeline.
    """
    squares = {name: (gradients[name] * gradients[name]).sum() for name in owned}
    everyone: dict[str, Tensor] = {}
    for by_name in group.all_gather(squares):
        everyone.update(by_name)
    ordered = [everyone[name].reshape([1]).astype("float32") for name in sorted(everyone)]
    return paddle.sqrt(paddle.add_n(ordered))


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """Returns limit / max(norm, limit)."""
    bound = paddle.full([1], limit, "float32")
    return bound / paddle.clip(norm, min=limit)
