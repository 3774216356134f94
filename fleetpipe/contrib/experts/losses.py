"""Losses that gates leave behind in a forward, and that the pipeline carries to its loss.

A gate runs in some stage, and the loss is computed in the last. So each layer hands on, beside its
output, the sum of what gates before it and within it have left: a dict with two entries, which
crosses between stages as any other value does, and whose gradients come back the same way.
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
    """Returns the loss of a gate of Paddle's, which forgets it; None of any other layer."""
    take = getattr(layer, "get_loss", None)
    return take() if callable(take) else None


class AuxiliaryLoss(paddle.nn.Layer):
    """The loss of a pipeline whose layers leave losses of their own: those of gates, say.

    As ``loss_fn`` of a ``PipelineLayer``, ``criterion(output, label) + weight * auxiliary`` of each
    micro-batch, where ``auxiliary`` is the sum of what all layers have left, in their order.
    """

    def __init__(
        self, criterion: Function, weight: float = 0.01, take: Take = loss_of_gate
    ) -> None:
        """Adds to another loss.

        Args:
            criterion: ``criterion(output, label)`` gives a Tensor with one element.
            weight: What the sum of the layers' losses is multiplied by.
            take: Called with every sublayer of a layer that has run, returns its loss, or None.

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

    def forward(self, output: Nest, label: Nest) -> Tensor:
        """Returns the loss of a micro-batch."""
        loss = self.criterion(self.value_of(output), label)
        return loss + self.weight * output[_LOSS] if _is_carrier(output) else loss

    @staticmethod
    def carrying(functions: Mapping[int, Function], loss_fns: Sequence[Any]) -> dict[int, Function]:
        """Returns the layers of a list, such that they hand on losses.

        Args:
            functions: The layers and functions, by number.
            loss_fns: The loss functions of the model.

        Raises:
            ConfigError: Some loss functions want them, and others do not, or take others.
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
        """Returns an output of a layer without what is handed on beside it."""
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
    return functools.partial(_carried, take, *parts)


def _carried(take: Take, *call: Any) -> Nest:
    function, *arguments, value = call
    total = value[_LOSS] if _is_carrier(value) else None
    output = function(*arguments, AuxiliaryLoss.value_of(value))
    parts = (part for part in (function, *arguments) if isinstance(part, paddle.nn.Layer))
    for layer in (sub for part in parts for sub in part.sublayers(True)):
        loss = take(layer)
        if loss is not None:
            total = loss if total is None else total + loss
    return output if total is None else {_VALUE: output, _LOSS: total}
