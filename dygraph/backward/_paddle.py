"""Where hooks on gradients enter Paddle, for paddlepaddle 2.6.2 and 3.3.x."""

from __future__ import annotations

from typing import Any, Callable

from paddle.base import core

from fleetpipe.aliases import Tensor
from fleetpipe.paddle_api import paddle

#: Whether what runs behind each gradient of a parameter can be run (3.x), as autograd does.
CAN_RUN_REDUCE_HOOKS = hasattr(paddle.Tensor, "_apply_backward_hook")


def run_reduce_hooks(parameter: Tensor) -> None:
    """Runs what was registered to run whenever a gradient has been added to ``parameter``."""
    parameter._apply_backward_hook()


_Tensor: Any = core.eager.Tensor

#: Puts a hook on the gradient of a tensor, and returns its number; removes the one with a number.
put_grad_hook: Callable[[Tensor, Callable[[Tensor], object]], int] = _Tensor._register_grad_hook
remove_grad_hook: Callable[[Tensor, int], bool] = _Tensor._remove_grad_hook


def route_grad_hooks(
    put: Callable[[Tensor, Callable[[Tensor], object]], int],
    remove: Callable[[Tensor, int], bool],
) -> None:
    """Has ``tensor.register_hook``, and ``remove`` of what it returns, call these from now on."""
    _Tensor._register_grad_hook = put
    _Tensor._remove_grad_hook = remove


def is_made_by_pylayer(tensor: Tensor) -> bool:
    """Whether a tensor is what a ``PyLayer`` returned. Paddle never lets go of the graph's node."""
    return str(tensor.grad_fn.name()).startswith("GradNodePyLayer")


def number_of_hook(parameter: Tensor) -> int:
    """Puts a hook on the gradient of ``parameter`` and removes it; returns its number.

    Paddle counts them from 0 for each parameter, removed ones too.
    """
    number = put_grad_hook(parameter, _no_change)
    remove_grad_hook(parameter, number)
    return number


def _no_change(_grad: Tensor) -> None:
    return None
