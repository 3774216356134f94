"""Products in blocks, whose bits do not depend on how many ranks share a layer.

With sums by a tree, a whole weight is cut into as many blocks for every model-parallel degree, and
each rank has some of them. Every product is of one block, with the same shape everywhere, because
kernels may add up a product of another shape in another order. The sums over blocks follow
:mod:`fleetpipe.mesh.sums`: over a rank's own blocks here, and over the ranks in ``groups.total``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from fleetpipe.aliases import Context, Tensor
from fleetpipe.dygraph.tensor_parallel.groups import sums_by_tree
from fleetpipe.errors import ConfigError
from fleetpipe.mesh.sums import add, count_blocks, tree
from fleetpipe.paddle_api import paddle

#: Kernels compute so many numbers at once, and those that are left over with other bits.
_AT_ONCE = 8


class Blocks(NamedTuple):
    """The blocks of a parameter that a rank has, as the parameter's attribute ``blocks``.

    Attributes:
        axis: The axis that is cut.
        number: The number of blocks of the rank.
    """

    axis: int
    number: int


def blocks_of(parameter: Tensor) -> Blocks | None:
    """Returns the blocks of a parameter on this rank; None if nothing is computed in blocks."""
    blocks: Blocks | None = getattr(parameter, "blocks", None) if sums_by_tree() else None
    return blocks


def share_of_blocks(most: int, size: int, members: int) -> int:
    """Returns how many blocks of an axis a member has; 0 if there are fewer blocks than members.

    Args:
        most: The layer's ``blocks``.
        size: The size of the whole axis.
        members: The number of shards.
    """
    return min(most, count_blocks(size)) // members


def count_of(most: int, size: int, members: int, numbers: int, where: str) -> int:
    """Returns how many blocks of a layer this rank computes; 0 if nothing is computed in blocks.

    Args:
        most: The layer's ``blocks``: into how many blocks its whole weight is cut.
        size: The size of the whole axis that is cut.
        members: The number of shards.
        numbers: The size of a shard, which must be a multiple of what kernels compute at once.
        where: The layer's class.

    Raises:
        ConfigError: The layer would have other bits with another number of shards.
    """
    if not sums_by_tree():
        return 0
    if most < members or most & (most - 1):
        raise ConfigError(
            f"`{where}.blocks` (={most}) must be a power of two, and at least mp_degree"
            f" (={members})",
            cause="with sums by a tree each rank computes whole blocks of a layer",
            fix=f"set {where}.blocks = {max(8, 1 << (members - 1).bit_length())} before the layers"
            " are built, at each mp_degree that is to give the same bits",
        )
    if members > 1 and numbers % _AT_ONCE:
        raise ConfigError(
            f"with sums by a tree a shard (={numbers} numbers) must have a multiple of {_AT_ONCE}",
            where=f"{where} with size {size} and mp_degree={members}",
            cause=f"kernels compute {_AT_ONCE} numbers at once, and the remainder in another way,"
            " so that bits would depend on mp_degree",
            fix=f"round the size up to a multiple of {_AT_ONCE * members}, or lower mp_degree",
        )
    return share_of_blocks(most, size, members)


def refuse_beside_trees(what: str, cause: str, instead: str) -> None:
    """Refuses a computation that is impossible in blocks, if the job has sums by a tree.

    Args:
        what: The name of the computation.
        cause: Why it is impossible.
        instead: The thing to use instead.

    Raises:
        ConfigError: The job has sums by a tree.
    """
    if sums_by_tree():
        raise ConfigError(
            f"sums by a tree do not go with {what}",
            cause=cause,
            fix=f"use {instead}, or leave 'sums' out of strategy.fleetpipe_configs",
        )


class _Uses(paddle.autograd.PyLayer):
    """Passes a tensor on to several uses, whose gradients are added by a tree."""

    @staticmethod
    def forward(ctx: Context, tensor: Tensor, count: int) -> Tensor:
        return tuple(tensor.view(tensor.shape) for _ in range(count))

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Tensor:
        return tree(grads, add)


class _SumOfBlocks(paddle.autograd.PyLayer):
    """Adds up tensors by a tree."""

    @staticmethod
    def forward(ctx: Context, *terms: Tensor) -> Tensor:
        ctx.count = len(terms)
        return tree(terms, add)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        return (grad,) * ctx.count


def uses(tensor: Tensor, count: int) -> Sequence[Tensor]:
    """Returns ``tensor`` for each of ``count`` uses, whose gradients are added by a tree."""
    if count == 1 or tensor.stop_gradient or not paddle.is_grad_enabled():
        return [tensor] * count
    apply: Callable[..., Sequence[Tensor]] = _Uses.apply
    return apply(tensor, count)


def sum_blocks(terms: Sequence[Tensor]) -> Tensor:
    """Returns the sum of tensors by a tree."""
    apply: Callable[..., Tensor] = _SumOfBlocks.apply
    return apply(*terms) if len(terms) > 1 else terms[0]


def split_blocks(tensor: Tensor, count: int, axis: int) -> Sequence[Tensor]:
    """Returns ``count`` equal blocks along an axis."""
    return paddle.split(tensor, count, axis=axis) if count > 1 else [tensor]


def join_blocks(parts: Sequence[Tensor]) -> Tensor:
    """Returns blocks joined along the last axis."""
    return paddle.concat(parts, axis=-1) if len(parts) > 1 else parts[0]


def sum_over_blocks(
    measure: Callable[[Tensor], Tensor], value: Tensor, parameter: Tensor
) -> Tensor:
    """Computes a measure of a parameter's shard, such as its square, block by block.

    Args:
        measure: Returns the measure of one tensor.
        value: The gradient of the shard, for example.
        parameter: The parameter, whose blocks count.
    """
    part = blocks_of(parameter)
    if part is None:
        return measure(value)
    return tree([measure(block) for block in split_blocks(value, part.number, part.axis)], add)
