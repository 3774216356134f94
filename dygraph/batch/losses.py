"""The losses of a batch: each loss function on each micro-batch, weighted and summed.

Also the loss functions in the forms that a user may give: one, a list, or none.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.dygraph import gradients
from fleetpipe.dygraph.nest import outline
from fleetpipe.errors import BoundaryError, ConfigError, FleetPipeError, reason
from fleetpipe.mesh.sums import tree
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.amp import rehearsal_dtype
from fleetpipe.paddle_api.tensor import NoNumbersError

#: ``criterion(output, label)`` gives a Tensor with one element.
Criterion = Callable[[Nest, Nest], Tensor]


def functions_in(loss_fn: Any) -> list[Any]:
    """Returns the loss functions of ``loss_fn`` as a list; None in it stands for no function."""
    return list(loss_fn) if isinstance(loss_fn, (list, tuple)) else [loss_fn]


def require_functions(loss_fn: Any) -> None:
    """Refuses a loss function that would fail in the first batch, and only on the last rank."""
    for function in functions_in(loss_fn):
        is_class = isinstance(function, type)
        if function is not None and (is_class or not callable(function)):
            raise ConfigError(
                "loss_fn is called with the model's output and the label",
                expected="a function or a built layer, or a list of these",
                got=f"the class {function.__name__}" if is_class else repr(function),
                fix=f"pass {function.__name__}()" if is_class else "pass nn.CrossEntropyLoss()",
            )


def required_functions(loss_fn: Any) -> list[Criterion]:
    """Returns the loss functions, or raises a ``ConfigError`` if there is none."""
    functions = functions_in(loss_fn)
    if not functions or None in functions:
        raise ConfigError(
            "this PipelineLayer has no loss function", fix="pass loss_fn= when you build it"
        )
    return functions


def carried_in(loss_fn: Any) -> Any:
    """Returns the first loss function that needs more from the layers than an output; or None.

    Its ``carrying`` takes the layers by number and all loss functions, and returns layers that add
    the extra values to their output; its ``value_of`` removes these from an output.
    """
    carried = (one for one in functions_in(loss_fn) if hasattr(type(one), "carrying"))
    return next(carried, None)


class Losses:
    """Computes the losses of the micro-batches of one batch, and stores them."""

    def __init__(
        self,
        functions: Sequence[Criterion],
        weights: Sequence[Fraction],
        chosen: int = 0,
        delayed: bool = False,
        weight_of: Callable[[int, int], Fraction] | None = None,
        units: int = 1,
        by_tree: bool = False,
    ) -> None:
        """Starts without a loss.

        Args:
            functions: Each ``function(output, label)`` gives a Tensor with one element.
            weights: The weight of each micro-batch in the batch's loss.
            chosen: The number of the function whose loss backward starts from.
            delayed: Whether backward starts from the loss without its weight, and the caller
                weights all gradients afterwards (``delay_scale_loss``).
            weight_of: Returns the weight of a micro-batch, or of a unit, from the numbers of the
                function and of the micro-batch; None to use ``weights``.
            units: The number of units of a micro-batch. If it is more than 1, methods take the
                number of a unit wherever they say micro-batch.
            by_tree: Whether the losses of micro-batches are added by a tree, not one after another.
        """
        self._units = units
        self._by_tree = by_tree
        self.functions = functions
        self._weights = weights
        self._weight_of = weight_of or (lambda _, index: weights[index])
        self._chosen = chosen
        self._delayed = delayed
        #: Called once all micro-batches are taken.
        self.complete: Callable[[], None] | None = None
        self._shares: list[dict[int, Tensor]] = [{} for _ in functions]

    def take(self, index: int, output: Nest, label: Nest) -> Tensor:
        """Computes all losses of micro-batch ``index``; returns the one that backward starts from.

        Raises:
            BoundaryError: A loss function cannot take the values, or returns something else.
        """
        start = None
        for number, function in enumerate(self.functions):
            share = _loss(function, output, label)
            if not self._delayed:
                share = weighted(share, self._weight_of(number, index))
            self._shares[number][index] = share.detach()
            if number == self._chosen:
                start = share
        count = len(self._weights) * self._units
        if self.complete is not None and len(self._shares[0]) == count:
            self.complete()
        return start

    def totals(self) -> list[Tensor]:
        """Returns the batch's loss by each function, detached, with that loss's shape and dtype.

        They are sums in the order of the micro-batches, whatever order these ran in.
        """
        totals = []
        for shares in self._shares:
            in_order = [shares[index] for index in sorted(shares)]
            total = self._add_up(in_order)
            totals.append(weighted(total, self._weights[0]) if self._delayed else total)
        return totals

    def _add_up(self, shares: Sequence[Tensor]) -> Tensor:
        if self._by_tree:
            return tree(shares, operator.add)
        return functools.reduce(operator.add, shares)

    def by_micro_batch(self) -> list[Tensor]:
        """Returns a Tensor [micro-batches] for each function; weighted unless delayed."""
        stacked = [
            paddle.stack([shares[index].reshape([]) for index in sorted(shares)])
            for shares in self._shares
        ]
        if self._units == 1:
            return stacked
        return [losses.reshape([-1, self._units]).sum(axis=1) for losses in stacked]

    def __bool__(self) -> bool:
        return bool(self._shares[0])


def weighted(loss: Tensor, weight: Fraction) -> Tensor:
    """Returns a micro-batch's share of the batch's loss."""
    # A quotient, not a product with 1/m: this is what a hand-written accumulation loop does,
    # and the two differ in the last bit where m is not a power of two.
    if weight.numerator != 1:
        loss = loss * weight.numerator
    if weight.denominator != 1:
        loss = loss / weight.denominator
    return loss


#: What Paddle says of a tensor without memory.
_WITHOUT_MEMORY = ("holder_ should not be null", "> memory_size():0")


def _loss(criterion: Criterion, output: Nest, label: Nest) -> Tensor:
    try:
        loss = criterion(output, label)
    except NoNumbersError as error:
        raise _refusal(error, output, label) from error
    except (FleetPipeError, MemoryError):
        # Of a collective within the loss, say: it is not what was passed.
        raise
    except Exception as error:
        raise _refusal(error, output, label) from error
    # Not loss.size: Paddle asks NumPy for that, which takes as long as the loss of a small model.
    if isinstance(loss, paddle.Tensor) and math.prod(loss.shape) == 1:
        half = loss.dtype == paddle.float16
        if half and loss.place.is_cpu_place() and rehearsal_dtype() is None:
            raise BoundaryError(
                "the losses of micro-batches are added up, and Paddle adds no float16 on a CPU",
                where="last stage",
                got=outline(loss),
                fix='return loss.astype("float32") from loss_fn',
            )
        return loss
    raise BoundaryError(
        "loss_fn(output, label) must return a Tensor with one element",
        where="last stage",
        got=outline(loss) if isinstance(loss, paddle.Tensor) else type(loss).__name__,
        fix="reduce the loss, e.g. with paddle.mean",
    )


def _refusal(error: Exception, output: Nest, label: Nest) -> BoundaryError:
    """Returns the error to raise instead of one of a loss function."""
    if gradients.is_refusal(error):
        return gradients.refusal(error, "the loss function", output)
    texts = (text in str(error) for text in _WITHOUT_MEMORY)
    if isinstance(error, NoNumbersError) or any(texts):
        return BoundaryError(
            "the loss function uses a parameter that lies on another rank",
            where="last stage",
            cause="it is a method of the model, or refers to one of its layers",
            fix="compute with the parameter in the model's forward, and return what the loss "
            "takes; or make the loss a Layer with parameters of its own",
        )
    head = "; behind a VocabularyHead, one that begins with vocabulary_cross_entropy"
    return BoundaryError(
        "the loss function cannot take the model's output and the label",
        where="last stage",
        got=f"output {outline(output)}; label {outline(label)}",
        cause=reason(error),
        fix="give labels of the shape and dtype that loss_fn(output, label) takes, or another "
        "loss_fn" + head * isinstance(output, tuple),
    )
