"""The operations inside tensor-parallel layers: collectives with gradients, products in blocks.

A member is a rank that holds a shard of a layer. With sums by a tree, a whole weight is cut into
the same blocks at every model-parallel degree, and each member computes with some of them: so the
bits of a product do not depend on the degree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any, NamedTuple, TypeVar, cast

from fleetpipe.aliases import Context, PaddleGroup, Tensor
from fleetpipe.dygraph.tensor_parallel import groups
from fleetpipe.dygraph.tensor_parallel.groups import sums_by_tree
from fleetpipe.errors import ConfigError, FleetPipeError, UsageError
from fleetpipe.mesh.sums import add, count_blocks, tree
from fleetpipe.paddle_api import eager_operations, paddle

#: The number of elements that vector instructions compute at once; the bits of a remainder differ.
_LANES = 8

FunctionInBackward = TypeVar("FunctionInBackward", bound=Callable[..., Any])
#: Errors of collectives in the backward that runs; see :func:`own_errors`.
_errors_in_backward: list[FleetPipeError] = []


class Blocks(NamedTuple):
    """How a parameter on this rank is cut into blocks; a parameter has it as attribute ``blocks``.

    Attributes:
        axis: The axis that is cut.
        number: The number of blocks on this rank.
    """

    axis: int
    number: int


def blocks_of(parameter: Tensor) -> Blocks | None:
    """Returns how a parameter is cut into blocks; None if the job does not sum by trees."""
    blocks: Blocks | None = getattr(parameter, "blocks", None) if sums_by_tree() else None
    return blocks


def share_of_blocks(blocks: int, size: int, members: int) -> int:
    """Returns the number of blocks that each member has; 0 if there are fewer blocks than members.

    Args:
        blocks: The largest number of blocks into which the whole axis may be cut, over all members.
        size: The size of the whole axis.
        members: The number of members.
    """
    return min(blocks, count_blocks(size)) // members


def count_blocks_here(
    blocks: int, size: int, members: int, shard_size: int, class_name: str
) -> int:
    """Returns the number of blocks of a layer that this member computes; 0 without sums by a tree.

    Args:
        blocks: The layer's ``blocks``: the number of blocks of its whole weight.
        size: The size of the whole axis that is cut.
        members: The number of shards.
        shard_size: The number of elements of a shard, a multiple of ``_LANES``.
        class_name: The name of the layer's class, for errors.

    Raises:
        ConfigError: The layer's results would have other bits with another number of shards.
    """
    if not sums_by_tree():
        return 0
    if blocks < members or blocks & (blocks - 1):
        raise ConfigError(
            f"`{class_name}.blocks` (={blocks}) must be a power of two, and at least mp_degree"
            f" (={members})",
            cause="with sums by a tree each rank computes whole blocks of a layer",
            fix=f"set {class_name}.blocks = {max(8, 1 << (members - 1).bit_length())} before the"
            " layers are built, at each mp_degree that is to give the same bits",
        )
    if members > 1 and shard_size % _LANES:
        raise ConfigError(
            f"with sums by a tree a shard (={shard_size} numbers) must have a multiple of {_LANES}",
            where=f"{class_name} with size {size} and mp_degree={members}",
            cause=f"kernels compute {_LANES} numbers at once, and the remainder in another way,"
            " so that bits would depend on mp_degree",
            fix=f"round the size up to a multiple of {_LANES * members}, or lower mp_degree",
        )
    return share_of_blocks(blocks, size, members)


def refuse_beside_trees(computation: str, cause: str, instead: str) -> None:
    """Refuses a computation whose bits depend on the degree, if the job has sums by a tree.

    Args:
        computation: The name of the computation.
        cause: Why its bits depend on the degree.
        instead: What to use instead.
    """
    if sums_by_tree():
        raise ConfigError(
            f"sums by a tree do not go with {computation}",
            cause=cause,
            fix=f"use {instead}, or leave 'sums' out of strategy.fleetpipe_configs",
        )


class _Blocks(paddle.autograd.PyLayer):
    """Cuts a weight into blocks of rows (axis 0), which share its memory, or of columns (1)."""

    @staticmethod
    def forward(ctx: Context, weight: Tensor, count: int, axis: int) -> Tensor:
        """Returns ``count`` equal blocks of ``weight`` along ``axis``."""
        ctx.axis = axis
        rows, columns = weight.shape
        if axis == 0:
            size = rows // count
            return tuple(weight[n * size : (n + 1) * size] for n in range(count))
        row_pieces = weight.reshape([rows * count, columns // count])
        all_indices = _indices_of_columns(rows, count)
        return tuple(paddle.gather(row_pieces, indices) for indices in all_indices)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Tensor:
        """Returns the gradient of the weight: those of its blocks, joined."""
        return paddle.concat(grads, axis=ctx.axis)


@cache
def _indices_of_columns(rows: int, count: int) -> list[Tensor]:
    """Returns the rows that hold each block of columns of a reshaped weight.

    The reshaped weight is [rows * count, columns / count]: each row is cut into ``count`` pieces.
    Gathering a block from it takes a fraction of the time of Paddle's ``split``.
    """
    return [paddle.arange(rows) * count + number for number in range(count)]


class _CopyForEachBlock(paddle.autograd.PyLayer):
    """Returns ``count`` views of a tensor; their gradients are added by a tree."""

    @staticmethod
    def forward(ctx: Context, tensor: Tensor, count: int) -> Tensor:
        """Returns ``count`` views of ``tensor``."""
        return tuple(tensor.view(tensor.shape) for _ in range(count))

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Tensor:
        """Returns the sum of the gradients of all views, by a tree."""
        return tree(grads, eager_operations.total)


class _SumOfBlocks(paddle.autograd.PyLayer):
    """Returns the sum of tensors by a tree."""

    @staticmethod
    def forward(ctx: Context, *terms: Tensor) -> Tensor:
        """Returns the sum of ``terms`` by a tree."""
        ctx.count = len(terms)
        return tree(terms, eager_operations.total)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        """Returns for each term the gradient of the sum."""
        return (grad,) * ctx.count


def column_product(x: Tensor, weight: Tensor, count: int, transposed: bool = False) -> Tensor:
    """Returns ``x @ weight``, computed block by block of the weight's columns.

    Args:
        x: ``[.., inputs]``.
        weight: ``[inputs, outputs]``.
        count: The number of blocks.
        transposed: Whether the weight is ``[outputs, inputs]``.
    """
    weights = _split_weight(weight, count, axis=0 if transposed else 1)
    if count > 1 and not x.stop_gradient and paddle.is_grad_enabled():
        use: Callable[..., Sequence[Tensor]] = _CopyForEachBlock.apply
        operands = zip(use(x, count), weights)
    else:
        operands = zip([x] * count, weights)
    columns = [eager_operations.product(*pair, right_transposed=transposed) for pair in operands]
    return join_blocks(columns)


def row_product(x: Tensor, weight: Tensor, count: int) -> Tensor:
    """Returns ``x @ weight`` as the sum of a product for each block of the weight's rows.

    Args:
        x: ``[.., inputs]``.
        weight: ``[inputs, outputs]``.
        count: The number of blocks.
    """
    operands = zip(split_blocks(x, count, axis=-1), _split_weight(weight, count, axis=0))
    return sum_blocks([eager_operations.product(*pair) for pair in operands])


def _split_weight(weight: Tensor, count: int, axis: int) -> Sequence[Tensor]:
    """Returns ``count`` equal blocks of a weight along an axis; gradients are joined again."""
    split: Callable[..., Sequence[Tensor]] = _Blocks.apply
    return split(weight, count, axis) if count > 1 else [weight]


def sum_blocks(terms: Sequence[Tensor]) -> Tensor:
    """Returns the sum of tensors by a tree, with a gradient."""
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
    """Returns the sum of ``measure(block)`` over the blocks of a value, by a tree.

    Without sums by a tree it returns ``measure(value)``.

    Args:
        measure: Returns a number that adds up over blocks, such as a tensor's squared norm.
        value: A tensor with the shape of the parameter, such as its gradient.
        parameter: The parameter, which says how the value is cut into blocks.
    """
    blocks = blocks_of(parameter)
    if blocks is None:
        return measure(value)
    parts = split_blocks(value, blocks.number, blocks.axis)
    return tree([measure(part) for part in parts], add)


@contextmanager
def own_errors() -> Iterator[None]:
    """A context in which a collective that fails in a backward raises its own error, not Paddle's.

    Raises:
        PeerFailed: Another member left while a gradient was under way.
        PipelineTimeout: Another member did not come within the limit.
    """
    _errors_in_backward.clear()
    try:
        yield
    except Exception as error:
        if _errors_in_backward:
            raise _errors_in_backward.pop() from error
        raise


def recording_errors(function: FunctionInBackward) -> FunctionInBackward:
    """Returns a function that runs in backward and records its errors, for :func:`own_errors`."""

    @wraps(function)
    def run(*args: Any, **named: Any) -> Any:
        """Runs the function, and records its error."""
        try:
            return function(*args, **named)
        except FleetPipeError as error:
            _errors_in_backward.append(error)
            raise

    return cast("FunctionInBackward", run)


class _Collective(paddle.autograd.PyLayer):
    """An operation: the forward returns ``run(tensor)``, the backward ``gradient(grad)``."""

    @staticmethod
    def forward(
        ctx: Context,
        tensor: Tensor,
        run: Callable[[Tensor], Tensor],
        gradient: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Returns ``run(tensor)``."""
        ctx.gradient = gradient
        return run(tensor)

    @staticmethod
    @recording_errors
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        """Returns ``gradient(grad)``, the gradient of the tensor."""
        return ctx.gradient(grad)


#: ``collective(tensor, run, gradient)`` returns ``run(tensor)``, whose backward runs ``gradient``.
collective: Callable[..., Tensor] = _Collective.apply


def _view_of(tensor: Tensor, members: groups.Members) -> Tensor:
    """Returns a view of a tensor, for a forward that changes nothing."""
    # Shares the memory. A detached tensor would not do: Paddle takes it for changed in place.
    return tensor.view(tensor.shape)


def _copy_of(tensor: Tensor, members: groups.Members) -> Tensor:
    """Returns a copy of a tensor, for a backward that changes nothing."""
    # A copy: autograd may add to the result in place while the tensor is in use elsewhere.
    return tensor.clone()


def _shard_of_member(tensor: Tensor, members: groups.Members, axis: int = 0) -> Tensor:
    """Returns this member's shard of a tensor along an axis."""
    return shard_of(tensor, axis, members.rank, members.ranks)


def _join_shards(tensor: Tensor, members: groups.Members, axis: int = 0) -> Tensor:
    """Returns the tensors of all members, joined along an axis. Collective."""
    return paddle.concat(groups.gather(tensor, members), axis=axis)


def identity(tensor: Tensor, group: PaddleGroup) -> Tensor:
    """Returns ``tensor``, which is equal on all members; its gradient is summed over the members.

    Collective in backward, if ``tensor`` needs a gradient.
    """
    return _call_over_members(tensor, group, _view_of, groups.total)


def all_reduce(tensor: Tensor, group: PaddleGroup) -> Tensor:
    """Returns the sum of all members' tensors, with the same bits on each. Collective.

    The gradient of each summand is the gradient of the sum, which is equal on all members.
    """
    return _call_over_members(tensor, group, groups.total, _copy_of)


def split(tensor: Tensor, group: PaddleGroup, axis: int = -1) -> Tensor:
    """Returns this member's shard of an axis. Collective in backward.

    Args:
        tensor: A tensor that is equal on all members; their number must divide the axis.
        group: The members.
        axis: The axis that is cut.

    Raises:
        UsageError: The axis cannot be cut into equal shards.
    """
    return _call_over_members(
        tensor, group, partial(_shard_of_member, axis=axis), partial(_join_shards, axis=axis)
    )


def gather(tensor: Tensor, group: PaddleGroup, axis: int = -1) -> Tensor:
    """Returns all members' tensors joined along an axis. Collective.

    The layers that follow must compute the same on every member: the gradient of a member's tensor
    is its shard of the result's gradient.
    """
    return _call_over_members(
        tensor, group, partial(_join_shards, axis=axis), partial(_shard_of_member, axis=axis)
    )


def gather_parts(tensor: Tensor, group: PaddleGroup) -> Tensor:
    """Returns all members' tensors joined along the first axis. Collective, in backward too.

    The layers that follow may compute different values on the members: the gradient of a member's
    tensor is its part of the sum of the members' gradients.
    """
    return _call_over_members(tensor, group, _join_shards, shard_of_sum)


def reduce_scatter(tensor: Tensor, group: PaddleGroup) -> Tensor:
    """Returns this member's part of the sum of all members' tensors. Collective, backward too.

    Raises:
        UsageError: The first axis cannot be cut into equal parts.
    """
    return _call_over_members(tensor, group, shard_of_sum, _join_shards)


def shard_of_sum(tensor: Tensor, members: groups.Members) -> Tensor:
    """Returns this member's part of the sum of all members' tensors, without a gradient.

    Collective.
    """
    parts = [shard_of(tensor, 0, rank, members.ranks) for rank in range(members.ranks)]
    return members.reduce_scatter(parts)


def parallel_matmul(
    hidden: Tensor, table: Tensor, gather_output: bool = False, mp_group: PaddleGroup = None
) -> Tensor:
    """Returns ``hidden @ table.T``: the logits of a head that shares an embedding's weight.

    Collective if the output is gathered, and in backward if ``hidden`` needs a gradient.

    Args:
        hidden: ``[.., width]``, the same on every member.
        table: This member's rows of ``[vocabulary, width]``, as the ``weight`` of a
            ``VocabParallelEmbedding``, or the whole table.
        gather_output: Whether each member returns the logits of the whole vocabulary, or only those
            of its rows, for ``ParallelCrossEntropy``.
        mp_group: Paddle's group of the members; by default the group of ``fleet.init``.
    """
    product: Callable[..., Tensor] = paddle.matmul
    blocks = blocks_of(table)
    is_cut = getattr(table, "is_distributed", False)
    if not is_cut and blocks is None:
        return product(hidden, table, transpose_y=True)
    group = groups.model_parallel_group(mp_group)
    hidden = identity(hidden, group) if is_cut else hidden
    count = 1 if blocks is None else blocks.number
    logits = column_product(hidden, table, count, transposed=True)
    return gather(logits, group) if is_cut and gather_output else logits


def dropout(
    x: Tensor,
    p: float = 0.5,
    axis: int = -1,
    training: bool = True,
    mode: str = "upscale_in_train",
    mp_group: PaddleGroup = None,
) -> Tensor:
    """Drops the elements of this member's shard that dropout of the whole tensor would drop.

    Every member draws the whole mask and uses its shard of it; not collective. So one seed gives
    the same masks at every model-parallel degree, if the members' generators have the same state,
    as in a ``PipelineLayer``.

    Args:
        x: This member's shard of a tensor.
        p: The share of elements to drop.
        axis: The axis along which the tensor is cut: the last one after a ``ColumnParallelLinear``,
            the axis of the heads in attention.
        training: Whether to drop at all.
        mode: As in ``nn.functional.dropout``.
        mp_group: Paddle's group of the members; by default the group of ``fleet.init``.

    Returns:
        A tensor like ``x``.
    """
    plain: Callable[..., Tensor] = paddle.nn.functional.dropout
    group = groups.model_parallel_group(mp_group)
    whole = group.nranks == 1
    if (whole and not sums_by_tree()) or not training or p == 0:
        return plain(x, p, training=training, mode=mode)
    shape = list(x.shape)
    shape[axis] *= group.nranks
    mask = plain(paddle.ones(shape, dtype=x.dtype), p, training=True, mode=mode)
    # With sums by a tree the whole tensor is multiplied by its mask, too: Paddle's dropout divides.
    return x * (mask if whole else shard_of(mask, axis, group.rank, group.nranks))


def shard_of(whole: Tensor, axis: int, rank: int, ranks: int) -> Tensor:
    """Returns a copy of shard ``rank`` of ``ranks`` equal shards along ``axis``.

    Raises:
        UsageError: The axis cannot be cut into equal shards.
    """
    size = whole.shape[axis]
    if size % ranks:
        raise UsageError(
            f"axis {axis} (={size}) must be divisible by the model-parallel degree (={ranks})",
            got=f"a tensor of shape {list(whole.shape)}",
            fix=f"pad the axis to {-(-size // ranks) * ranks}, or choose another mp_degree",
        )
    width = size // ranks
    axis %= len(whole.shape)
    part: Tensor = paddle.slice(whole, [axis], [rank * width], [(rank + 1) * width])
    return part.clone()


def _call_over_members(
    tensor: Tensor, group: PaddleGroup, run: Callable[..., Tensor], gradient: Callable[..., Tensor]
) -> Tensor:
    """Returns ``run(tensor, members=..)``, whose backward runs ``gradient(grad, members=..)``.

    ``members`` are those of ``group``. If there is only one, it returns ``tensor`` itself.
    """
    members = groups.members_of(group)
    if members.ranks == 1:
        return tensor
    return collective(tensor, partial(run, members=members), partial(gradient, members=members))
