"""Hooks on what a leaf layer took and returned change gradients where backward is split, too."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle import nn

from tests.dygraph.backward.leaves import fused_and_split, numbers


class Hooked(nn.Layer):
    """Hooks on the output of a layer, one of which is taken away again."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        y = self.inner(x)
        y.register_hook(lambda grad: grad * 0.25)
        y.register_hook(lambda grad: None)
        handle = y.register_hook(lambda grad: grad * 3)
        y.register_hook(lambda grad: grad + 1)
        assert handle.remove()
        assert not handle.remove()
        return paddle.tanh(y) + y


class HookedInside(nn.Layer):
    """A leaf that puts hooks on its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([4, 4])

    def forward(self, x: Any) -> Any:
        x.register_hook(lambda grad: grad * 0.5)
        return x @ self.weight


class AfterInPlace(nn.Layer):
    """Hooks on what an operation in place made of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        y = nn.functional.relu_(self.inner(x))
        y.register_hook(lambda grad: grad * 0.5)
        return y * 2


MODELS: dict[str, Callable[[], Any]] = {
    "one operation": lambda: Hooked(nn.Linear(4, 4, bias_attr=False)),
    "two operations": lambda: Hooked(nn.Linear(4, 4)),
    "a graph of its own": lambda: Hooked(nn.Conv1D(2, 2, 3, padding=1)),
    "its own input": lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), HookedInside()),
    "its own input, returned by another": lambda: nn.Sequential(nn.Linear(4, 4), HookedInside()),
    "after an operation in place": AfterInPlace,
}


@pytest.mark.parametrize("model", MODELS)
def test_what_a_hook_returns_goes_on(model: str) -> None:
    shape = (2, 2, 4) if model == "a graph of its own" else (3, 4)
    inputs = [numbers(*shape, seed=k) for k in range(3)]
    expected, got, _ = fused_and_split(MODELS[model], inputs)
    assert got == expected


def test_an_output_dies_without_the_garbage_collector() -> None:
    outputs: list[Any] = []

    class Noted(Hooked):
        def forward(self, x: Any) -> Any:
            y = self.inner(x)
            y.register_hook(lambda grad: grad * 2)
            outputs.append(weakref.ref(y))
            return paddle.tanh(y)

    gc.disable()
    try:
        fused_and_split(lambda: Noted(nn.Linear(4, 4)), [numbers(3, 4)])
        assert len(outputs) >= 2
        assert all(output() is None for output in outputs)
    finally:
        gc.enable()
