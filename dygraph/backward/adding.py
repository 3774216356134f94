"""Adds gradients that waited to those that the parameters have.

The first of a batch goes through autograd, and so does every one that a hook wants to see; the rest
is added where the sum lies, which saves autograd's round for each layer and micro-batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Callable

from fleetpipe.aliases import Context, Tensor
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.tensor import CAN_RUN_REDUCE_HOOKS, number_of_hook, run_reduce_hooks


class Sums:
    """The gradients of parameters, as they grow in one batch."""

    def __init__(self) -> None:
        """Begins with none."""
        self._begun: set[int] = set()

    def end(self) -> None:
        """Forgets the batch: Paddle's ``clear_grad`` leaves zeros that it replaces, not adds to."""
        self._begun.clear()

    def is_open(self, parameter: Tensor) -> bool:
        """Whether a gradient of ``parameter`` may be added without autograd, to ``.grad``."""
        return (
            CAN_RUN_REDUCE_HOOKS
            and id(parameter) in self._begun
            and not is_watched(parameter)
            # A callback may have dropped it in the middle of the batch.
            and parameter.grad is not None
            and parameter.grad.is_dense()
        )

    def note(self, parameter: Tensor) -> None:
        """Takes note that a gradient was added to ``parameter.grad`` without autograd."""
        run_reduce_hooks(parameter)

    def add(self, grads: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Adds gradients to their parameters, hooks included.

        Args:
            grads: Parameters and gradients, each parameter once.
        """
        rest = []
        for parameter, grad in grads:
            if self.is_open(parameter) and grad.is_dense() and grad.dtype == parameter.grad.dtype:
                with paddle.no_grad():
                    parameter.grad.add_(grad)
                self.note(parameter)
            else:
                rest.append((parameter, grad))
        _add_by_autograd(rest)
        self._begun.update(id(parameter) for parameter, _ in rest)


#: What crosses autograd where no value does.
_TOKEN = paddle.zeros([1])


class _Sum(paddle.autograd.PyLayer):
    """Adds gradients to parameters as autograd does, which copies those that it is started with."""

    @staticmethod
    def forward(ctx: Context, handed: _Handed, *_parameters: Tensor) -> Tensor:
        ctx.handed = handed
        return _TOKEN.detach()

    @staticmethod
    def backward(ctx: Context, _token: Tensor) -> Tensor:
        grads, ctx.handed.grads = ctx.handed.grads, []
        return tuple(grads) if len(grads) > 1 else grads[0]


class _Handed:
    """Gradients, where Paddle does not see them: of a list it would take each for an input."""

    def __init__(self, grads: list[Tensor]) -> None:
        self.grads = grads


def _add_by_autograd(grads: Sequence[tuple[Tensor, Tensor]]) -> None:
    if grads:
        parameters, gradients = map(list, zip(*grads))
        add: Callable[..., Tensor] = _Sum.apply
        add(_Handed(gradients), *parameters).backward()


#: Hooks on the gradient that came and went by this module's own doing, by the parameter's id.
_own_hooks: dict[int, int] = {}


def count_own_hook(parameter: Tensor) -> None:
    """Says that a hook on the gradient of ``parameter`` is gone, which fleetpipe had put there."""
    if id(parameter) not in _own_hooks:
        weakref.finalize(parameter, _own_hooks.pop, id(parameter), None)
    _own_hooks[id(parameter)] = _own_hooks.get(id(parameter), 0) + 1


def is_watched(parameter: Tensor) -> bool:
    """Whether anybody but fleetpipe ever put a hook on the gradient of ``parameter``.

    Paddle numbers the hooks of a parameter and tells nothing else of them.
    """
    count_own_hook(parameter)
    return number_of_hook(parameter) != _own_hooks[id(parameter)] - 1
