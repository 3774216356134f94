"""Cross entropy of logits of which each member holds the columns of its part of the vocabulary.

A member is a rank that holds a shard. Each call needs one collective. For each row a member sends
three numbers: its greatest logit, the sum of the exponentials of its logits minus the greatest one,
and the label's logit, or 0 if another member holds it. Every member computes the same loss from
these. Backward needs no collective.
"""

from __future__ import annotations

from collections.abc import Callable

from fleetpipe.aliases import Context, PaddleGroup, Tensor
from fleetpipe.dygraph.tensor_parallel import operations
from fleetpipe.dygraph.tensor_parallel.groups import Members, gather, is_alone, members_of
from fleetpipe.dygraph.tensor_parallel.layer import ParallelLayer
from fleetpipe.dygraph.tensor_parallel.linear_and_embedding import refuse_unknown_ids
from fleetpipe.errors import UsageError
from fleetpipe.mesh.groups import SoleGroup
from fleetpipe.mesh.sums import add, tree
from fleetpipe.paddle_api import paddle

_HALF_DTYPES = (paddle.float16, paddle.bfloat16)


class ParallelCrossEntropy(ParallelLayer):
    """Softmax and cross entropy, not reduced, over a vocabulary that is cut into shards."""

    def __init__(
        self, mp_group: PaddleGroup = None, name: str | None = None, ignore_index: int = -100
    ) -> None:
        """Creates the layer, which has no parameters.

        Args:
            mp_group: Paddle's group of the members; by default the group of ``fleet.init``.
            name: Accepted as in Paddle.
            ignore_index: The loss of rows with this label is 0, and so is their gradient.
        """
        super().__init__(mp_group)
        self.name = name
        self.ignore_index = ignore_index

    def forward(self, input: Tensor, label: Tensor) -> Tensor:
        """Computes the loss of each row. Collective.

        Args:
            input: This member's columns ``[.., V / members]`` of the logits.
            label: Ids in the whole vocabulary, integers ``[..]`` or ``[.., 1]``, the same on every
                member.

        Returns:
            The loss ``[.., 1]`` of the logits' dtype, with the same bits on every member.

        Raises:
            UsageError: The labels are soft, of another shape, or outside of the vocabulary.
        """
        whole = not self.is_mp or is_alone()
        members: Members = SoleGroup() if whole else members_of(self.model_parallel_group)
        label = _check_labels(label, input, self.ignore_index, members.ranks)
        size = input.shape[-1] * members.ranks
        count = operations.count_blocks_here(
            self.blocks, size, members.ranks, 0, type(self).__name__
        )
        if whole and not count:
            dense: Callable[..., Tensor] = paddle.nn.functional.cross_entropy
            return dense(input, label, ignore_index=self.ignore_index, reduction="none")
        apply: Callable[..., Tensor] = _CrossEntropy.apply
        return apply(input, label, self.ignore_index, members, count)


def _check_labels(label: Tensor, logits: Tensor, ignore_index: int, members: int) -> Tensor:
    """Returns the labels as ``[.., 1]`` of int64; refuses labels that do not fit.

    Args:
        label: The labels.
        logits: This member's columns of the logits.
        ignore_index: The label of rows that are ignored.
        members: The number of members.
    """
    rows = list(logits.shape[:-1])
    if label.dtype not in (paddle.int32, paddle.int64):
        raise UsageError(
            "ParallelCrossEntropy takes the numbers of the classes, no soft labels",
            expected="labels of int32 or int64",
            got=f"{label.dtype} of shape {list(label.shape)}",
            fix="gather the logits and use nn.CrossEntropyLoss(soft_label=True)",
        )
    if list(label.shape) not in (rows, [*rows, 1]):
        raise UsageError(
            "the shape of the labels does not fit the logits",
            expected=f"{rows} or {[*rows, 1]}",
            got=f"{list(label.shape)} with logits of shape {list(logits.shape)}",
            fix="give one label for each row of the logits",
        )
    label = label.astype("int64").reshape([*rows, 1])
    counted = paddle.where(label == ignore_index, paddle.zeros_like(label), label)
    refuse_unknown_ids(counted, logits.shape[-1] * members, "a label")
    return label


class _CrossEntropy(paddle.autograd.PyLayer):
    """Computes the loss of each row, and its gradient.

    ``count`` is the number of this member's blocks of columns; 0 without sums by a tree. Memory for
    logits costs more than arithmetic on them, so forward and backward each allocate it only once.
    """

    @staticmethod
    def forward(
        ctx: Context,
        logits: Tensor,
        label: Tensor,
        ignore_index: int,
        members: Members,
        count: int,
    ) -> Tensor:
        """Returns the loss of each row, [.., 1], from this member's columns. Collective."""
        exact = logits.astype("float32") if logits.dtype in _HALF_DTYPES else logits
        width = logits.shape[-1]
        column = label - members.rank * width
        ignored = label == ignore_index
        here = paddle.logical_and(column >= 0, column < width)
        here = paddle.logical_and(here, paddle.logical_not(ignored))
        # The index in flattened logits [rows x width] of each label's logit; of others the first.
        flat = paddle.where(here, column, paddle.zeros_like(column)).reshape([-1])
        flat_indices = paddle.arange(flat.shape[0], dtype="int64") * width + flat
        # A member may hold nothing but -inf, as padding of the vocabulary does.
        least = float(paddle.finfo(exact.dtype).min)
        blocks = max(count, 1)
        by_block = exact.reshape([*exact.shape[:-1], blocks, width // blocks])
        maxima = by_block.max(axis=-1).clip(min=least)
        differences = (by_block - maxima.unsqueeze(-1)).reshape(exact.shape)
        # The bits of an exponential and of a sum may depend on the shape; a difference's do not.
        powers = [d.exp_() for d in operations.split_blocks(differences, blocks, axis=-1)]
        sums = [power.sum(axis=-1, keepdim=True) for power in powers]
        label_logits = paddle.gather(exact.reshape([-1]), flat_indices).reshape(label.shape)
        label_logits = paddle.where(here, label_logits, paddle.zeros_like(label_logits))
        message = paddle.concat([maxima, *sums, label_logits], axis=-1)
        loss, highest, total = _combine_members(gather(message, members), count)
        scales = operations.split_blocks(maxima - highest, blocks, axis=-1)
        factors = operations.join_blocks([paddle.exp(scale) for scale in scales]) / total
        ctx.save_for_backward(flat_indices, here, ignored, factors, *powers)
        ctx.dtype = logits.dtype
        return paddle.where(ignored, paddle.zeros_like(loss), loss).astype(logits.dtype)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        """Returns the gradient of this member's columns of the logits."""
        flat_indices, here, ignored, factors, *powers = ctx.saved_tensor()
        grad = grad.astype(powers[0].dtype)
        zeros = paddle.zeros_like(grad)
        grad = paddle.where(ignored, zeros, grad)
        scales = operations.split_blocks(factors * grad, len(powers), axis=-1)
        gradient = operations.join_blocks([power * scale for power, scale in zip(powers, scales)])
        flat = gradient.reshape([-1])
        of_labels = paddle.where(here, grad, zeros).reshape([-1])
        paddle.scatter_(flat, flat_indices, paddle.gather(flat, flat_indices) - of_labels)
        return flat.reshape(gradient.shape).astype(ctx.dtype)


def _combine_members(messages: list[Tensor], count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the loss from what all members send.

    Args:
        messages: For each member and row the maximum of each block, the sum of each block, and the
            label's logit.
        count: The number of blocks of columns of each member; 0 without sums by a tree.

    Returns:
        For each row the loss, the greatest logit, and the sum of the exponentials of all logits
        minus the greatest one.
    """
    blocks = max(count, 1)
    maxima = paddle.concat([message[..., :blocks] for message in messages], axis=-1)
    sums = paddle.concat([message[..., blocks : 2 * blocks] for message in messages], axis=-1)
    label_logits = paddle.concat([message[..., 2 * blocks :] for message in messages], axis=-1)
    highest = maxima.max(axis=-1, keepdim=True)
    terms = sums * paddle.exp(maxima - highest)
    if count:
        total = tree(operations.split_blocks(terms, terms.shape[-1], axis=-1), add)
    else:
        total = terms.sum(axis=-1, keepdim=True)
    loss = paddle.log(total) - (label_logits.sum(axis=-1, keepdim=True) - highest)
    return loss, highest, total
