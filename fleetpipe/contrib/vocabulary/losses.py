"""The loss of a model with a vocabulary head: the cross-entropy over the parts of its logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fleetpipe.aliases import Context, Nest, Tensor
from fleetpipe.contrib.vocabulary.head import DeferredLogits
from fleetpipe.errors import BoundaryError, ConfigError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.kernels import mean_leaves_out_below_zero
from fleetpipe.paddle_api.tensor import to_host
from fleetpipe.representation import shows


class _Copies(paddle.autograd.PyLayer):
    """Returns a copy for each part, whose gradients are added as in a pipeline: the last first."""

    @staticmethod
    def forward(ctx: Context, value: Tensor, count: int) -> tuple[Tensor, ...]:
        return tuple(value.clone() for _ in range(count))

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Tensor:
        *rest, total = grads
        for grad in rest[::-1]:
            total = total + grad
        return total


def vocabulary_cross_entropy(output: Nest, label: Tensor, ignore_index: int = -100) -> Tensor:
    """Computes the cross-entropy of each row, like ``F.cross_entropy(.., reduction="none")``.

    Args:
        output: The output of a model whose last layer is a :class:`VocabularyHead`.
        label: One class, an integer, for each row.
        ignore_index: The label of rows that do not count: their loss is 0.

    Returns:
        A Tensor of the label's shape.

    Raises:
        BoundaryError: The output is of another kind of model, or a label is no class of it.
    """
    if isinstance(output, DeferredLogits):
        copy: Callable[..., Sequence[Tensor]] = _Copies.apply
        pairs = zip(output.parts, copy(output.hidden, len(output.parts)))
        output = tuple(part.statistics(value, label) for part, value in pairs)
    if not isinstance(output, tuple) or not all(isinstance(one, paddle.Tensor) for one in output):
        raise BoundaryError(
            "vocabulary_cross_entropy takes what a model with a VocabularyHead returns",
            got=type(output).__name__,
            fix="make VocabularyHead(hidden, vocabulary) the last entry of the list of layers",
        )
    sums, chosen, here = paddle.stack(list(output), axis=1)
    labels = label.reshape([-1])
    counted = labels != ignore_index
    unknown = paddle.logical_and(counted, here.detach().sum(axis=0) == 0)
    if bool(to_host(unknown.any())):
        raise BoundaryError(
            "a label is no class of the VocabularyHead",
            expected=f"0 to vocabulary - 1, or ignore_index={ignore_index}",
            got=f"label {labels[unknown].tolist()[0]}",
            fix="correct the labels, or pass ignore_index for rows that do not count",
        )
    losses = paddle.logsumexp(sums, axis=0) - chosen.sum(axis=0)
    return (losses * counted.astype(losses.dtype)).reshape(label.shape)


@shows("ignore_index", "reduction")
class VocabularyLoss:
    """The loss of a model whose last layer is a :class:`VocabularyHead`.

    Args:
        ignore_index: The label of rows that do not count.
        reduction: "mean" over the rows that count, or "sum". As in Paddle's ``CrossEntropyLoss``,
            all rows count if ``ignore_index`` is below 0 (in 3.3, not in 2.6).

    Raises:
        ConfigError: The reduction is another one.
    """

    def __init__(self, ignore_index: int = -100, reduction: str = "mean") -> None:
        if reduction not in ("mean", "sum"):
            raise ConfigError(
                "the loss of a batch is one number",
                expected="reduction='mean' or 'sum'",
                got=f"reduction={reduction!r}",
                fix="for each row's use vocabulary_cross_entropy in a loss_fn of your own",
            )
        self.ignore_index, self.reduction = ignore_index, reduction
        kind: Any = paddle.nn.CrossEntropyLoss
        #: The loss that counts the same positions.
        self.declares = kind(ignore_index=ignore_index, reduction=reduction)

    def __call__(self, output: Nest, label: Tensor) -> Tensor:
        """Returns the loss of a micro-batch; see :func:`vocabulary_cross_entropy`."""
        losses = vocabulary_cross_entropy(output, label, self.ignore_index)
        if self.reduction == "sum":
            return losses.sum()
        if self.ignore_index < 0 and not mean_leaves_out_below_zero():
            return losses.mean()
        return losses.sum() / (label != self.ignore_index).sum().clip(min=1).astype(losses.dtype)
