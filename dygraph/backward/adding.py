"""Adds gradients that waited to those that the parameters have.

The first of a batch goes through autograd, and so does every one that a hook wants to see; the rest
is added where the sum lies, which saves autograd's round for each layer and micro-batch.
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
    """The gradients of parameters, as they grow in one batch."""

    def __init__(self) -> None:
        #: The parameters that have one, by id.
        self.begun: set[int] = set()

    def end(self) -> None:
        """Forgets the batch: Paddle's ``clear_grad`` leaves zeros that it replaces, not adds to."""
        self.begun.clear()

    def add(self, grads: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Adds gradients to their parameters, hooks included; autograd is off meanwhile.

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
    """Returns what crosses autograd where no value does.

    It is made when a backward needs it: with the first operation of a process Paddle takes some
    hundreds of megabytes of a GPU, and commands that only import this need none.
    """
    made = paddle.zeros([1], "float32")
    made.stop_gradient = stop_gradient
    return made


class _Sum(paddle.autograd.PyLayer):
    """Adds gradients to parameters as autograd does, which copies those that it is started with."""

    @staticmethod
    def forward(ctx: Context, handed: _Handed, *_parameters: Tensor) -> Tensor:
        ctx.handed = handed
        return token().detach()

    @staticmethod
    def backward(ctx: Context, _token: Tensor) -> Tensor:
        grads, ctx.handed.grads = ctx.handed.grads, []
        return tuple(grads) if len(grads) > 1 else grads[0]


class _Handed:
    """Gradients, where Paddle does not see them: of a list it would take each for an input."""

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
