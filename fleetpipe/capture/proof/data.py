"""Finds the inputs of a proof: those that the plain model accepts."""

from __future__ import annotations

from typing import Any

from fleetpipe.aliases import Layer, Nest
from fleetpipe.capture.proof.comparison import undo_training
from fleetpipe.capture.tracing.capturing import in_mode
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
