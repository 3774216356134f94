"""The inputs of a proof: variations of the example's numbers and rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.capture.proof.comparison import undo_training
from fleetpipe.capture.repeatability import negate, roll
from fleetpipe.capture.tracing.capturing import Capturing, in_mode
from fleetpipe.capture.tracing.signature import with_numbers
from fleetpipe.capture.tracing.walk import Unopened, Walk, arguments_of
from fleetpipe.dygraph.nest import map_tensors, tensors_of
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.operations import Function, intercepting

#: More operations than a forward on the example has, and it is taken for an endless loop.
_TIMES, _MORE = 10, 1000


class _Endless(BaseException):
    """Ends a forward that runs too long; no ``Exception``, which a user's ``except`` could stop."""


class _Counted(Walk):
    """Counts operations, and ends a forward that makes too many."""

    def __init__(self, model: Layer, most: float) -> None:
        super().__init__(model, Unopened())
        self.count, self._most = 0, most

    def operation(self, function: Function, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Counts an operation, and runs it."""
        self.count += 1
        if self.count > self._most:
            raise _Endless
        return super().operation(function, args, named)


class Trial:
    """Finds the inputs that the plain model accepts."""

    def __init__(self, model: Layer) -> None:
        """Starts without a run; the first one sets the limit of operations."""
        self._model = model
        self._most = float("inf")

    def accepts(self, inputs: Nest, training: bool = True) -> bool:
        """Whether the model runs on inputs, comes to an end, and returns finite numbers."""
        args, named = arguments_of(map_tensors(lambda tensor: tensor.clone(), inputs))
        walk = _Counted(self._model, self._most)
        try:
            with undo_training(self._model), in_mode(self._model, training), intercepting(walk):
                output = self._model(*args, **named)
        except (Exception, _Endless):
            # What the model itself refuses is nothing to compare.
            return False
        self._most = min(self._most, _TIMES * walk.count + _MORE)
        return all(
            bool(paddle.isfinite(tensor).all())
            for tensor in tensors_of(output)
            if tensor.is_floating_point() and tensor.size
        )


def variants(capturing: Capturing) -> Iterator[Nest]:
    """Yields the example, and inputs of its shapes with other numbers.

    They have rows and columns in another order, new random numbers, other signs, zeros (with which
    a mask selects nothing) and equal numbers (with which a maximum is a tie).
    """
    numbers = np.random.default_rng(0)

    def draw(tensor: Tensor) -> Tensor:
        def anew(values: Any) -> Any:
            if not values.size or not tensor.is_floating_point():
                return numbers.permutation(values.ravel()).reshape(values.shape)
            return numbers.normal(values.mean(), values.std(), values.shape)

        return with_numbers(tensor, anew)

    changes: tuple[Callable[[Tensor], Tensor], ...] = (_same, roll, draw, negate, _zeros, _ties)
    for change in changes:
        yield capturing.vary(change)


def with_another_row(capturing: Capturing) -> Nest:
    """Returns the example with its first row repeated at the end of every tensor of as many."""
    tensors = tensors_of(capturing.example)
    rows = next((tensor.shape[0] for tensor in tensors if tensor.ndim), 0)

    def longer(tensor: Tensor) -> Tensor:
        if not tensor.ndim or tensor.shape[0] != rows or not rows:
            return tensor
        return with_numbers(tensor, lambda numbers: np.concatenate([numbers, numbers[:1]]))

    return capturing.vary(longer)


def _same(tensor: Tensor) -> Tensor:
    return tensor.detach()


def _zeros(tensor: Tensor) -> Tensor:
    """Returns zeros; for whole numbers their least one, at least 0, as they may number classes."""

    def least(numbers: Any) -> Any:
        whole = numbers.dtype.kind in "iu" and numbers.size
        return np.full_like(numbers, max(numbers.min(), 0) if whole else 0)

    return with_numbers(tensor, least)


def _ties(tensor: Tensor) -> Tensor:
    def first(numbers: Any) -> Any:
        return np.full_like(numbers, numbers.flat[0] if numbers.size else 0)

    return with_numbers(tensor, first)
