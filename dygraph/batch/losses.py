"""The losses of a batch: every loss function on every micro-batch, weighted, summed, by number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Callable

from fleetpipe._paddle import paddle
from fleetpipe.dygraph.nest import outline
from fleetpipe.errors import BoundaryError, FleetPipeError, reason

Criterion = Callable[[Any, Any], Any]


class Losses:
    """What the loss functions gave for the micro-batches of one batch."""

    def __init__(
        self,
        functions: Sequence[Criterion],
        weights: Sequence[Fraction],
        chosen: int = 0,
        delayed: bool = False,
    ) -> None:
        """Begins with no micro-batch.

        Args:
            functions: Each ``function(output, label)`` gives a Tensor with one element.
            weights: The weight of each micro-batch in the loss of the batch.
            chosen: The function whose loss backward starts from.
            delayed: Whether backward starts from the loss as it is; the gradients are then to be
                weighted afterwards, all at once (``delay_scale_loss``).
        """
        self._functions = functions
        self._weights = weights
        self._chosen = chosen
        self._delayed = delayed
        self._shares: list[dict[int, Any]] = [{} for _ in functions]

    def take(self, index: int, output: Any, label: Any) -> Any:
        """Computes all losses of micro-batch ``index``; returns the one to start backward from.

        Raises:
            BoundaryError: A loss function cannot take the values, or returns something else.
        """
        start = None
        for number, function in enumerate(self._functions):
            share = _loss(function, output, label)
            if not self._delayed:
                share = weighted(share, self._weights[index])
            self._shares[number][index] = share.detach()
            if number == self._chosen:
                start = share
        return start

    def totals(self) -> list[Any]:
        """Returns the loss of the batch by each function, detached, with its own shape and dtype.

        The micro-batches are added in their order, whatever order they ran in.
        """
        totals = []
        for shares in self._shares:
            first, *others = (shares[index] for index in sorted(shares))
            for share in others:
                first = first + share
            totals.append(weighted(first, self._weights[0]) if self._delayed else first)
        return totals

    def by_micro_batch(self) -> list[Any]:
        """Returns a Tensor [micro-batches] for each function; weighted unless delayed."""
        return [
            paddle.stack([shares[index].reshape([]) for index in sorted(shares)])
            for shares in self._shares
        ]

    def __bool__(self) -> bool:
        """Whether any micro-batch was taken."""
        return bool(self._shares[0])


def weighted(loss: Any, weight: Fraction) -> Any:
    """Returns a micro-batch's share of the loss of the batch."""
    # A quotient, not a product with 1/m: this is what a hand-written accumulation loop does,
    # and the two differ in the last bit where m is not a power of two.
    if weight.numerator != 1:
        loss = loss * weight.numerator
    if weight.denominator != 1:
        loss = loss / weight.denominator
    return loss


def _loss(criterion: Criterion, output: Any, label: Any) -> Any:
    try:
        loss = criterion(output, label)
    except (FleetPipeError, MemoryError):
        # Of a collective within the loss, say: it is not what was passed.
        raise
    except Exception as error:
        raise BoundaryError(
            "the loss function cannot take the model's output and the label",
            where="last stage",
            got=f"output {outline(output)}; label {outline(label)}",
            cause=reason(error),
            fix="give labels of the shape and dtype that loss_fn(output, label) takes, or another "
            "loss_fn",
        ) from error
    # Not loss.size: Paddle asks NumPy for that, which takes as long as the loss of a small model.
    if isinstance(loss, paddle.Tensor) and math.prod(loss.shape) == 1:
        return loss
    raise BoundaryError(
        "loss_fn(output, label) must return a Tensor with one element",
        where="last stage",
        got=outline(loss) if isinstance(loss, paddle.Tensor) else type(loss).__name__,
        fix="reduce the loss, e.g. with paddle.mean",
    )
