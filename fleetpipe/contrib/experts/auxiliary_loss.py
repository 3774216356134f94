"""Carries the losses of gates through a pipeline to its loss.

A gate runs in some stage, and the loss is computed in the last stage. So each layer returns a dict
of its output and the sum of the losses of all gates before it and within it. The dict crosses
between stages as any other value does, and its gradients come back the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api import paddle

_VALUE, _LOSS = "value", "auxiliary loss"
#: Returns what a layer has left in the forward that ended just now; None for nothing.
Take = Callable[[Layer], Tensor | None]
Function = Callable[..., Nest]


def loss_of_gate(layer: Layer) -> Tensor | None:
    """Takes the loss away from a gate of Paddle's; returns None for any other layer."""
    take = getattr(layer, "get_loss", None)
    return take() if callable(take) else None


class AuxiliaryLoss(paddle.nn.Layer):
    """The loss of a pipeline whose layers have losses of their own, as gates do.

    As ``loss_fn`` of a ``PipelineLayer``, it is ``criterion(output, label) + weight * auxiliary``
    for each micro-batch. ``auxiliary`` is the sum of the losses of all layers, in their order.
    """

    def __init__(
        self, criterion: Function, weight: float = 0.01, take: Take = loss_of_gate
    ) -> None:
        """Wraps another loss.

        Args:
            criterion: ``criterion(output, label)`` gives a Tensor with one element.
            weight: What the sum of the layers' losses is multiplied by.
            take: Called with every sublayer of a layer that has run; returns its loss, or None.

        Raises:
            ConfigError: ``criterion`` or ``take`` cannot be called.
        """
        super().__init__()
        if not (callable(criterion) and callable(take)):
            raise ConfigError(
                "AuxiliaryLoss(criterion, weight, take) calls criterion and take",
                expected="a loss function, and a function of a layer that returns a Tensor or None",
                got=f"criterion={criterion!r}, take={take!r}",
                fix="AuxiliaryLoss(nn.MSELoss(), take=lambda layer: getattr(layer, 'l_aux', None))",
            )
        self.criterion, self.weight, self.take = criterion, weight, take

    @property
    def declares(self) -> Any:
        """The function that declares of how many positions the loss is the mean."""
        return self.criterion

    def forward(self, output: Nest, label: Nest) -> Tensor:
        """Returns the loss of a micro-batch."""
        loss = self.criterion(self.value_of(output), label)
        return loss + self.weight * output[_LOSS] if _is_carrier(output) else loss

    @staticmethod
    def carrying(functions: Mapping[int, Function], loss_fns: Sequence[Any]) -> dict[int, Function]:
        """Wraps the layers of a list so that they hand on the losses of gates.

        Args:
            functions: The layers and functions, by number.
            loss_fns: The loss functions of the model.

        Raises:
            ConfigError: Some loss functions are no ``AuxiliaryLoss``, or have another ``take``.
        """
        takes = {getattr(loss_fn, "take", None) for loss_fn in loss_fns if _wants(loss_fn)}
        if len(takes) > 1 or not all(map(_wants, loss_fns)):
            raise ConfigError(
                "all loss functions of a model take the same losses of its layers",
                expected="an AuxiliaryLoss each, with the same take",
                got=", ".join(type(loss_fn).__name__ for loss_fn in loss_fns),
                fix="wrap the others in AuxiliaryLoss too, with weight=0",
            )
        (take,) = takes
        return {index: _carrier(function, take) for index, function in functions.items()}

    @staticmethod
    def value_of(output: Nest) -> Nest:
        """Returns the output of a layer without the loss that it hands on."""
        return output[_VALUE] if _is_carrier(output) else output


def _wants(loss_fn: Any) -> bool:
    return isinstance(loss_fn, AuxiliaryLoss)


def _is_carrier(value: Nest) -> bool:
    return isinstance(value, dict) and value.keys() == {_VALUE, _LOSS}


def _carrier(function: Function, take: Any) -> Function:
    # A partial of the layer itself: so a layer is known where another function calls it.
    parts = (function,)
    if isinstance(function, functools.partial):
        parts = (function.func, *function.args)
    return functools.partial(_run_and_carry, take, *parts)


def _run_and_carry(take: Take, *call: Any) -> Nest:
    function, *arguments, value = call
    total = value[_LOSS] if _is_carrier(value) else None
    output = function(*arguments, AuxiliaryLoss.value_of(value))
    parts = (part for part in (function, *arguments) if isinstance(part, paddle.nn.Layer))
    for layer in (sub for part in parts for sub in part.sublayers(True)):
        loss = take(layer)
        if loss is not None:
            total = loss if total is None else total + loss
    return output if total is None else {_VALUE: output, _LOSS: total}
