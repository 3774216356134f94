"""Products in blocks, whose bits do not depend on how many ranks share a layer.

With sums by a tree, a whole weight is cut into as many blocks for every model-parallel degree, and
each rank has some of them. Every product is of one block, with the same shape everywhere, because
kernels may add up a product of another shape in another order. The sums over blocks follow
:mod:`fleetpipe.mesh.sums`: over a rank's own blocks here, and over the ranks in ``groups.total``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from fleetpipe.aliases import Context, Tensor
from fleetpipe.dygraph.tensor_parallel.groups import sums_by_tree
from fleetpipe.errors import ConfigError
from fleetpipe.mesh.sums import add, count_blocks, tree
from fleetpipe.paddle_api import kernels, paddle

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
    """Returns how many blocks of an axis a member has; 0 if there are fewer blocks than members."""
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
    """
    if sums_by_tree():
        raise ConfigError(
            f"sums by a tree do not go with {what}",
            cause=cause,
            fix=f"use {instead}, or leave 'sums' out of strategy.fleetpipe_configs",
        )


class _Blocks(paddle.autograd.PyLayer):
    """The blocks of a weight; those of rows share its memory."""

    @staticmethod
    def forward(ctx: Context, weight: Tensor, count: int, axis: int) -> Tensor:
        ctx.axis = axis
        rows, columns = weight.shape
        if axis == 0:
            each = rows // count
            return tuple(weight[n * each : (n + 1) * each] for n in range(count))
        pieces = weight.reshape([rows * count, columns // count])
        return tuple(paddle.gather(pieces, places) for places in _places(rows, count))

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Tensor:
        return paddle.concat(grads, axis=ctx.axis)


@cache
def _places(rows: int, count: int) -> list[Tensor]:
    """Returns, for each of ``count`` blocks of columns, where its pieces of rows are.

    To gather them takes a fraction of the time of Paddle's ``split``.
    """
    return [paddle.arange(rows) * count + number for number in range(count)]


class _Uses(paddle.autograd.PyLayer):
    """Passes a tensor on to several uses, whose gradients are added by a tree."""

    @staticmethod
    def forward(ctx: Context, tensor: Tensor, count: int) -> Tensor:
        return tuple(tensor.view(tensor.shape) for _ in range(count))

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Tensor:
        return tree(grads, kernels.total)


class _SumOfBlocks(paddle.autograd.PyLayer):
    """Adds up tensors by a tree."""

    @staticmethod
    def forward(ctx: Context, *terms: Tensor) -> Tensor:
        ctx.count = len(terms)
        return tree(terms, kernels.total)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        return (grad,) * ctx.count


def column_product(x: Tensor, weight: Tensor, count: int, transposed: bool = False) -> Tensor:
    """Returns ``x @ weight``, of which each block computes some columns.

    Args:
        x: ``[.., inputs]``.
        weight: ``[inputs, outputs]``.
        count: The number of blocks.
        transposed: Whether the weight is ``[outputs, inputs]``.
    """
    weights = _split_weight(weight, count, axis=0 if transposed else 1)
    if count > 1 and not x.stop_gradient and paddle.is_grad_enabled():
        use: Callable[..., Sequence[Tensor]] = _Uses.apply
        operands = zip(use(x, count), weights)
    else:
        operands = zip([x] * count, weights)
    columns = [kernels.product(*pair, right_transposed=transposed) for pair in operands]
    return join_blocks(columns)


def row_product(x: Tensor, weight: Tensor, count: int) -> Tensor:
    """Returns ``x @ weight`` as a sum, of which each block computes a term.

    Args:
        x: ``[.., inputs]``.
        weight: ``[inputs, outputs]``.
        count: The number of blocks.
    """
    operands = zip(split_blocks(x, count, axis=-1), _split_weight(weight, count, axis=0))
    return sum_blocks([kernels.product(*pair) for pair in operands])


def _split_weight(weight: Tensor, count: int, axis: int) -> Sequence[Tensor]:
    split: Callable[..., Sequence[Tensor]] = _Blocks.apply
    return split(weight, count, axis) if count > 1 else [weight]


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
