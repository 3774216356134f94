"""Adds delayed gradients to the gradients that the parameters have.

The first gradient of a batch goes through autograd, and so does every one that a hook watches. The
others are added to the sum in place, which saves a run of autograd for each layer and micro-batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cache

from fleetpipe.aliases import Context, Tensor
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.kernels import add_in_place
from fleetpipe.paddle_api.tensor import CAN_RUN_REDUCE_HOOKS, number_of_hook, run_reduce_hooks


class Sums:
    """Adds up the gradients of parameters over one batch."""

    def __init__(self) -> None:
        #: The parameters that have one, by id.
        self.begun: set[int] = set()

    def end(self) -> None:
        """Ends the batch: the next gradients must replace zeros that ``clear_grad`` may leave."""
        self.begun.clear()

    def add(self, grads: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Adds gradients to their parameters and runs hooks; autograd must be off.

        Args:
            grads: Parameters and gradients, each parameter once.
        """
        rest = []
        for parameter, grad in grads:
            total = self.total(parameter)
            if total is not None and grad.is_dense() and grad.dtype == total.dtype:
                add_in_place(total, grad)
                run_reduce_hooks(parameter)
            else:
                rest.append((parameter, grad))
        if rest:
            _add_by_autograd(rest)
            self.begun.update(id(parameter) for parameter, _ in rest)

    def total(self, parameter: Tensor) -> Tensor | None:
        """Returns the gradient of ``parameter`` if another may be added to it without autograd."""
        if id(parameter) not in self.begun or not CAN_RUN_REDUCE_HOOKS or is_watched(parameter):
            return None
        # A callback may have dropped it in the middle of the batch.
        total = parameter.grad
        return total if total is not None and total.is_dense() else None


@cache
def token(stop_gradient: bool = True) -> Tensor:
    """Returns the tensor that crosses autograd in the place of a value.

    It is made only when a backward needs it: the first operation of a process allocates some
    hundreds of megabytes on a GPU, and commands that only import this module need none.
    """
    made = paddle.zeros([1], "float32")
    made.stop_gradient = stop_gradient
    return made


class _Sum(paddle.autograd.PyLayer):
    """Adds gradients to parameters by autograd, without the copies that ``backward()`` makes."""

    @staticmethod
    def forward(ctx: Context, handed: _Handed, *_parameters: Tensor) -> Tensor:
        ctx.handed = handed
        return token().detach()

    @staticmethod
    def backward(ctx: Context, _token: Tensor) -> Tensor:
        grads, ctx.handed.grads = ctx.handed.grads, []
        return tuple(grads) if len(grads) > 1 else grads[0]


class _Handed:
    """Holds gradients out of Paddle's sight, which would take each in a list for an input."""

    def __init__(self, grads: list[Tensor]) -> None:
        self.grads = grads


def _add_by_autograd(grads: Sequence[tuple[Tensor, Tensor]]) -> None:
    parameters, gradients = map(list, zip(*grads))
    add: Callable[..., Tensor] = _Sum.apply
    with paddle.enable_grad():
        total = add(_Handed(gradients), *parameters)
    total.backward()


#: Hooks on the gradient that came and went by this module's own doing, by the parameter's id.
_own_hooks: dict[int, int] = {}


def count_own_hook(parameter: Tensor) -> None:
    """Counts a hook of fleetpipe's on the gradient of ``parameter`` that is removed again."""
    if id(parameter) not in _own_hooks:
        weakref.finalize(parameter, _own_hooks.pop, id(parameter), None)
    _own_hooks[id(parameter)] = _own_hooks.get(id(parameter), 0) + 1


def is_watched(parameter: Tensor) -> bool:
    """Whether a hook was ever put on the gradient of ``parameter`` by other code than fleetpipe's.

    Paddle only numbers the hooks of a parameter, and fleetpipe counts its own.
    """
    count_own_hook(parameter)
    return number_of_hook(parameter) != _own_hooks[id(parameter)] - 1
