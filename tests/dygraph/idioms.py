"""What people do around layers: hooks, gradients switched off.

Each model is a list of layers, [rows, FEATURES] to [rows, CLASSES], with a pair of layers that do
it and a layer before and behind each. Hooks are put where there are gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle import nn

from tests.pipelines import CLASSES, FEATURES


class Called(nn.Layer):  # type: ignore[misc]
    """Layers, and how they are called."""

    def __init__(self, call: Callable[..., Any], *parts: Any) -> None:
        super().__init__()
        self.call, self.parts = call, nn.LayerList(parts)

    def forward(self, x: Any) -> Any:
        return self.call(x, *self.parts)


def linear(**options: Any) -> Any:
    return nn.Linear(FEATURES, FEATURES, **options)


def hook(tensor: Any, function: Callable[[Any], Any]) -> Any:
    """Puts a hook on a tensor's gradient, if there will be one."""
    return None if tensor.stop_gradient else tensor.register_hook(function)


def hooked(x: Any, fc: Any) -> Any:
    y = fc(x)
    hook(y, lambda grad: grad * 3)
    hook(y, lambda grad: None)
    removed = hook(y, lambda grad: grad + 1)
    if removed is not None:
        removed.remove()
    hook(y, lambda grad: grad.clip(-0.1, 0.1))
    return paddle.tanh(y) + y


def hooked_late(x: Any, fc: Any) -> Any:
    y = fc(x)
    z = paddle.tanh(y) + fc(y)
    hook(y, lambda grad: grad * 0.3)
    return z


def hooked_input(x: Any, fc: Any) -> Any:
    hook(x, lambda grad: grad * 0.5)
    return fc(x) + x


def hooked_after_a_write(x: Any, fc: Any) -> Any:
    y = fc(x)
    with paddle.no_grad():
        y.add_(paddle.full_like(y, 0.2))
    hook(y, lambda grad: grad * 3)
    return y * 2 + x


def stopped_after_use(x: Any, fc: Any, other: Any) -> Any:
    h = fc(x)
    y = other(h)
    h.stop_gradient = True
    return y + h


def input_stopped_after_use(x: Any, fc: Any) -> Any:
    y = fc(x)
    x.stop_gradient = True
    return y + x


#: What hooks do.
HOOKS: dict[str, Callable[[], Any]] = {
    "hooks": lambda: Called(hooked, linear()),
    "hooks, one operation": lambda: Called(hooked, linear(bias_attr=False)),
    "late hook": lambda: Called(hooked_late, linear()),
    "hook on the input": lambda: Called(hooked_input, linear()),
    "hook after a write": lambda: Called(hooked_after_a_write, linear()),
}


#: What switching gradients off does.
STOPS: dict[str, Callable[[], Any]] = {
    "stopped after use": lambda: Called(stopped_after_use, linear(), linear()),
    "input stopped after use": lambda: Called(input_stopped_after_use, linear()),
}


def layers_of(make: Callable[[], Any]) -> list[Any]:
    """Returns the list of layers with what ``make`` makes in it."""
    return [linear(), make(), linear(), make(), nn.Linear(FEATURES, CLASSES)]
