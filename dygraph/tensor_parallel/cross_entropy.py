"""Cross entropy of logits of which each member holds the columns of its part of the vocabulary.

Each call needs one collective. For each row a member sends three numbers: its greatest logit, the
sum of the exponentials of its logits minus the greatest one, and the label's logit, or 0 if another
member holds it. Every member computes the same loss from these. Backward needs no collective.
"""

from __future__ import annotations

from collections.abc import Callable

from fleetpipe.aliases import Context, PaddleGroup, Tensor
from fleetpipe.dygraph.tensor_parallel import operations
from fleetpipe.dygraph.tensor_parallel.groups import Members, gather, is_alone, members_of
from fleetpipe.dygraph.tensor_parallel.layer import ParallelLayer
from fleetpipe.dygraph.tensor_parallel.linear_and_embedding import refuse_outside
from fleetpipe.errors import UsageError
from fleetpipe.mesh.groups import SoleGroup
from fleetpipe.mesh.sums import add, tree
from fleetpipe.paddle_api import paddle

_HALVES = (paddle.float16, paddle.bfloat16)


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
        count = operations.count_of(self.blocks, size, members.ranks, 0, type(self).__name__)
        if whole and not count:
            dense: Callable[..., Tensor] = paddle.nn.functional.cross_entropy
            return dense(input, label, ignore_index=self.ignore_index, reduction="none")
        apply: Callable[..., Tensor] = _CrossEntropy.apply
        return apply(input, label, self.ignore_index, members, count)


def _check_labels(label: Tensor, logits: Tensor, ignore_index: int, members: int) -> Tensor:
    """Returns the labels as ``[.., 1]`` of int64, or refuses them."""
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
    refuse_outside(counted, logits.shape[-1] * members, "a label")
    return label


class _CrossEntropy(paddle.autograd.PyLayer):
    """The loss of each row, and its gradient; ``count`` is the number of blocks, 0 for none.

    Memory for logits costs more than arithmetic on them, so each direction allocates it once.
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
        exact = logits.astype("float32") if logits.dtype in _HALVES else logits
        width = logits.shape[-1]
        column = label - members.rank * width
        ignored = label == ignore_index
        here = paddle.logical_and(column >= 0, column < width)
        here = paddle.logical_and(here, paddle.logical_not(ignored))
        places = _places(paddle.where(here, column, paddle.zeros_like(column)), width)
        # A member may hold nothing but -inf, as padding of the vocabulary does.
        least = float(paddle.finfo(exact.dtype).min)
        each = max(count, 1)
        parts = exact.reshape([*exact.shape[:-1], each, width // each])
        tops = parts.max(axis=-1).clip(min=least)
        above = (parts - tops.unsqueeze(-1)).reshape(exact.shape)
        # The bits of an exponential and of a sum may depend on the shape; a difference's do not.
        powers = [part.exp_() for part in operations.split_blocks(above, each, axis=-1)]
        sums = [power.sum(axis=-1, keepdim=True) for power in powers]
        picked = paddle.gather(exact.reshape([-1]), places).reshape(label.shape)
        picked = paddle.where(here, picked, paddle.zeros_like(picked))
        share = paddle.concat([tops, *sums, picked], axis=-1)
        loss, highest, below = _combine(gather(share, members), count)
        heights = [
            paddle.exp(one) for one in operations.split_blocks(tops - highest, each, axis=-1)
        ]
        factors = operations.join_blocks(heights) / below
        ctx.save_for_backward(places, here, ignored, factors, *powers)
        ctx.dtype = logits.dtype
        return paddle.where(ignored, paddle.zeros_like(loss), loss).astype(logits.dtype)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        places, here, ignored, factors, *powers = ctx.saved_tensor()
        grad = grad.astype(powers[0].dtype)
        zeros = paddle.zeros_like(grad)
        grad = paddle.where(ignored, zeros, grad)
        scales = operations.split_blocks(factors * grad, len(powers), axis=-1)
        whole = operations.join_blocks([power * scale for power, scale in zip(powers, scales)])
        spread = whole.reshape([-1])
        at_label = paddle.gather(spread, places) - paddle.where(here, grad, zeros).reshape([-1])
        paddle.scatter_(spread, places, at_label)
        return spread.reshape(whole.shape).astype(ctx.dtype)


def _places(column: Tensor, width: int) -> Tensor:
    """Returns the index of each row's column in the flattened logits."""
    flat = column.reshape([-1])
    return paddle.arange(flat.shape[0], dtype="int64") * width + flat


def _combine(shares: list[Tensor], count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the loss from what all members send.

    Returns:
        For each row the loss, the greatest logit, and the sum of the exponentials of all logits
        minus the greatest one.
    """
    each = max(count, 1)
    tops = paddle.concat([share[..., :each] for share in shares], axis=-1)
    sums = paddle.concat([share[..., each : 2 * each] for share in shares], axis=-1)
    picked = paddle.concat([share[..., 2 * each :] for share in shares], axis=-1)
    highest = tops.max(axis=-1, keepdim=True)
    terms = sums * paddle.exp(tops - highest)
    if count:
        below = tree(operations.split_blocks(terms, terms.shape[-1], axis=-1), add)
    else:
        below = terms.sum(axis=-1, keepdim=True)
    loss = paddle.log(below) - (picked.sum(axis=-1, keepdim=True) - highest)
    return loss, highest, below
