"""The collective operations inside tensor-parallel layers, each with the one that is its gradient.

    forward                 backward
    identity                all_reduce
    all_reduce              identity
    split                   gather
    gather                  split
    gather_parts            reduce_scatter
    reduce_scatter          gather_parts

The first four are f and g of Megatron-LM (arXiv:1909.08053). The others replace them if members
hold parts of the sequence between layers (arXiv:2205.05198). A group is Paddle's or fleetpipe's;
tensors have one shape on all of its members. Every collective of a layer goes through this file,
and so do their errors: Paddle turns an error in backward into an ``OSError``, from which
:func:`own_errors` restores the original.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, TypeVar, cast

from fleetpipe.aliases import Context, PaddleGroup, Tensor
from fleetpipe.dygraph.tensor_parallel import blocks, groups
from fleetpipe.errors import FleetPipeError, UsageError
from fleetpipe.paddle_api import paddle

Noted = TypeVar("Noted", bound=Callable[..., Any])
_raised: list[FleetPipeError] = []


@contextmanager
def own_errors() -> Iterator[None]:
    """While it is open, a failed collective raises the same error as outside of a backward.

    Raises:
        PeerFailed: Another member left while a gradient was under way.
        PipelineTimeout: Another member did not come within the limit.
    """
    _raised.clear()
    try:
        yield
    except Exception as error:
        if _raised:
            raise _raised.pop() from error
        raise


def noting(function: Noted) -> Noted:
    """Makes a function that runs in backward record its errors for :func:`own_errors`."""

    @wraps(function)
    def run(*args: Any, **named: Any) -> Any:
        try:
            return function(*args, **named)
        except FleetPipeError as error:
            _raised.append(error)
            raise

    return cast("Noted", run)


class _Collective(paddle.autograd.PyLayer):
    """Applies a function to a tensor, and another one to its gradient."""

    @staticmethod
    def forward(
        ctx: Context,
        tensor: Tensor,
        run: Callable[[Tensor], Tensor],
        gradient: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.gradient = gradient
        return run(tensor)

    @staticmethod
    @noting
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        return ctx.gradient(grad)


#: Takes a tensor, the function that is run on it, and the one that its gradient goes through.
collective: Callable[..., Tensor] = _Collective.apply


def _view(tensor: Tensor, members: groups.Members) -> Tensor:
    # Shares the memory; Paddle takes a detached tensor for one that was changed in place.
    return tensor.view(tensor.shape)


def _copy(tensor: Tensor, members: groups.Members) -> Tensor:
    # Autograd may add to what it is given while others still hold it.
    return tensor.clone()


def _own_shard(tensor: Tensor, members: groups.Members, axis: int = 0) -> Tensor:
    return shard_of(tensor, axis, members.rank, members.ranks)


def _join(tensor: Tensor, members: groups.Members, axis: int = 0) -> Tensor:
    return paddle.concat(groups.gather(tensor, members), axis=axis)


def identity(tensor: Tensor, group: PaddleGroup) -> Tensor:
    """Returns ``tensor``, the same on all members; its gradient is the sum of the members'.

    Collective in backward, if ``tensor`` needs a gradient.
    """
    return _apply(tensor, group, _view, groups.total)


def all_reduce(tensor: Tensor, group: PaddleGroup) -> Tensor:
    """Returns the sum of all members' tensors, with the same bits on each. Collective.

    The gradient of the sum, the same on all members, is the gradient of each summand.
    """
    return _apply(tensor, group, groups.total, _copy)


def split(tensor: Tensor, group: PaddleGroup, axis: int = -1) -> Tensor:
    """Returns this member's shard of an axis. Collective in backward.

    Args:
        tensor: A tensor that is the same on every member, whose axis the number of members divides.
        group: The members.
        axis: The axis that is cut.

    Raises:
        UsageError: The axis cannot be cut into equal shards.
    """
    return _apply(tensor, group, partial(_own_shard, axis=axis), partial(_join, axis=axis))


def gather(tensor: Tensor, group: PaddleGroup, axis: int = -1) -> Tensor:
    """Returns all members' tensors joined along an axis. Collective.

    The layers behind must do the same on every member: each keeps its shard of the gradient.
    """
    return _apply(tensor, group, partial(_join, axis=axis), partial(_own_shard, axis=axis))


def gather_parts(tensor: Tensor, group: PaddleGroup) -> Tensor:
    """Returns all members' tensors joined along the first axis. Collective, in backward too.

    The layers behind may differ on every member: each gets its part of the sum of all gradients.
    """
    return _apply(tensor, group, _join, part_of_total)


def reduce_scatter(tensor: Tensor, group: PaddleGroup) -> Tensor:
    """Returns this member's part of the sum of all members' tensors. Collective, backward too.

    Raises:
        UsageError: The first axis cannot be cut into equal parts.
    """
    return _apply(tensor, group, part_of_total, _join)


def part_of_total(tensor: Tensor, members: groups.Members) -> Tensor:
    """Does the same as :func:`reduce_scatter`, without a gradient. Collective."""
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
        mp_group: Paddle's group of the members; by default the one of ``fleet.init``.
    """
    product: Callable[..., Tensor] = paddle.matmul
    part = blocks.blocks_of(table)
    is_cut = getattr(table, "is_distributed", False)
    if not is_cut and part is None:
        return product(hidden, table, transpose_y=True)
    group = groups.model_parallel_group(mp_group)
    hidden = identity(hidden, group) if is_cut else hidden
    count = 1 if part is None else part.number
    logits = blocks.column_product(hidden, table, count, transposed=True)
    return gather(logits, group) if is_cut and gather_output else logits


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


def _apply(
    tensor: Tensor, group: PaddleGroup, run: Callable[..., Tensor], gradient: Callable[..., Tensor]
) -> Tensor:
    members = groups.members_of(group)
    if members.ranks == 1:
        return tensor
    return collective(tensor, partial(run, members=members), partial(gradient, members=members))
