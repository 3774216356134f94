"""What people do around layers: hooks, writes in place, gradients switched off.

Each model is a list of layers, [rows, FEATURES] to [rows, CLASSES], with a pair of layers that do
it and a layer before and behind each. Hooks are put where there are gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle import nn

from tests.dygraph.backward.leaves import Called, Leaf
from tests.pipelines import CLASSES, FEATURES


def leaf(call: Callable[..., Any]) -> Leaf:
    """A layer with a matrix and a vector of its own, and how they are used."""
    return Leaf(call, matrix=[FEATURES, FEATURES], shift=[FEATURES])


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


def hooked_argument(x: Any, matrix: Any, shift: Any) -> Any:
    hook(x, lambda grad: grad * 0.5)
    return x @ matrix + shift


def hooked_after_a_write(x: Any, fc: Any) -> Any:
    y = fc(x)
    with paddle.no_grad():
        y.add_(paddle.full_like(y, 0.2))
    hook(y, lambda grad: grad * 3)
    return y * 2 + x


def hooked_inside(x: Any, matrix: Any, shift: Any) -> Any:
    h = x @ matrix
    hook(h, lambda grad: grad * 3)
    y = h + shift
    hook(y, lambda grad: grad.clip(-0.1, 0.1))
    return y


def stopped_after_use(x: Any, fc: Any, other: Any) -> Any:
    h = fc(x)
    y = other(h)
    h.stop_gradient = True
    return y + h


def input_stopped_after_use(x: Any, fc: Any) -> Any:
    y = fc(x)
    x.stop_gradient = True
    return y + x


def stopped_by_a_leaf(x: Any, leaf: Any, fc: Any) -> Any:
    h = paddle.tanh(fc(x)) * 1.5
    return leaf(h) + h


def stops(x: Any, matrix: Any, shift: Any) -> Any:
    y = x @ matrix + shift
    x.stop_gradient = True
    return y


def with_its_argument(prepare: Callable[[Any], Any]) -> Callable[..., Any]:
    """What goes on with a tensor that it handed to a leaf."""

    def call(x: Any, leaf: Any, fc: Any) -> Any:
        h = prepare(x)
        z = leaf(h)
        return z + h * 0.5 + fc(x)

    return call


def adds_shift(x: Any, matrix: Any, shift: Any) -> Any:
    x.add_(shift)
    return x @ matrix


def sets_value(x: Any, matrix: Any, shift: Any) -> Any:
    x.set_value(x.detach() * 0.5)
    return x @ matrix + shift


_WRITES = (adds_shift, sets_value)
_ARGUMENTS: dict[str, Callable[[Any], Any]] = {
    "with gradient": lambda x: x * 1.5,
    "without": lambda x: x.detach() * 1.5,
}

#: What hooks do.
HOOKS: dict[str, Callable[[], Any]] = {
    "hooks": lambda: Called(hooked, linear()),
    "hooks, one operation": lambda: Called(hooked, linear(bias_attr=False)),
    "hooks, a graph of its own": lambda: Called(
        lambda x, conv: hooked(x.unsqueeze(1), conv).squeeze(1), nn.Conv1D(1, 1, 3, padding=1)
    ),
    "hooks on arguments of leaves": lambda: nn.Sequential(
        leaf(hooked_argument), nn.Tanh(), leaf(hooked_argument)
    ),
    "late hook": lambda: Called(hooked_late, linear()),
    "hook on the input": lambda: Called(hooked_input, linear()),
    "hook after a write": lambda: Called(hooked_after_a_write, linear()),
    "hooks in a leaf": lambda: leaf(hooked_inside),
}

#: What switching gradients off does.
STOPS: dict[str, Callable[[], Any]] = {
    "stopped after use": lambda: Called(stopped_after_use, linear(), linear()),
    "input stopped after use": lambda: Called(input_stopped_after_use, linear()),
    "stopped by a leaf": lambda: Called(stopped_by_a_leaf, leaf(stops), linear()),
}

#: What leaves write into their arguments.
WRITES: dict[str, Callable[[], Any]] = {
    f"{write.__name__}, {kind}": lambda write=write, prepare=prepare: Called(
        with_its_argument(prepare), leaf(write), linear()
    )
    for write in _WRITES
    for kind, prepare in _ARGUMENTS.items()
}


def layers_of(make: Callable[[], Any]) -> list[Any]:
    """Returns the list of layers with what ``make`` makes in it."""
    return [linear(), make(), linear(), make(), nn.Linear(FEATURES, CLASSES)]
