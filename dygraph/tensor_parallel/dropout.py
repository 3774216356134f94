"""Dropout of an activation that is cut into shards, with the mask of the whole activation."""

from __future__ import annotations

from collections.abc import Callable

from fleetpipe.aliases import PaddleGroup, Tensor
from fleetpipe.dygraph.tensor_parallel.groups import model_parallel_group, sums_by_tree
from fleetpipe.dygraph.tensor_parallel.operations import shard_of
from fleetpipe.paddle_api import paddle


def dropout(
    x: Tensor,
    p: float = 0.5,
    axis: int = -1,
    training: bool = True,
    mode: str = "upscale_in_train",
    mp_group: PaddleGroup = None,
) -> Tensor:
    """Drops the numbers of this member's shard that dropout of the whole tensor would drop.

    Every member draws the whole mask and keeps its shard; not collective. So one seed gives the
    same masks for every model-parallel degree, if the members' generators have the same state, as
    in a ``PipelineLayer``.

    Args:
        x: This member's shard of a tensor.
        p: The share that is dropped.
        axis: The axis along which it is cut: the last one after a ``ColumnParallelLinear``, the
            axis of the heads in attention.
        training: Whether to drop at all.
        mode: As in ``nn.functional.dropout``.
        mp_group: Paddle's group of the members; by default the one of ``fleet.init``.

    Returns:
        A tensor like ``x``.
    """
    plain: Callable[..., Tensor] = paddle.nn.functional.dropout
    group = model_parallel_group(mp_group)
    whole = group.nranks == 1
    if (whole and not sums_by_tree()) or not training or p == 0:
        return plain(x, p, training=training, mode=mode)
    shape = list(x.shape)
    shape[axis] *= group.nranks
    mask = plain(paddle.ones(shape, dtype=x.dtype), p, training=True, mode=mode)
    # A product for the whole tensor too, by a tree: Paddle's own dropout divides.
    return x * (mask if whole else shard_of(mask, axis, group.rank, group.nranks))
