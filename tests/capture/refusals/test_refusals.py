"""What no node can be made of: within a sublayer it is no matter, else the line is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe.errors import CaptureError, ConfigError
from tests.capture.beside import require_bits

pytestmark = pytest.mark.every_row

X = paddle.to_tensor(np.arange(24, dtype="float32").reshape([8, 3]) / 10)
LABELS = paddle.to_tensor([[0], [1], [2], [0]] * 2)


class Double(paddle.autograd.PyLayer):  # type: ignore[misc]
    """An operation of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 2


def branch(x: Any) -> Any:
    return x * 2 if x.sum() > 1 else x


def no_grad(x: Any) -> Any:
    with paddle.no_grad():
        scale = x.abs().mean() + 1
    return x * scale


def detached(x: Any) -> Any:
    return x * x.detach()


def by_writing(x: Any) -> Any:
    y = x * 1.0
    y[:, 0] = 3.0
    y.add_(x)
    return y


def own_operation(x: Any) -> Any:
    return Double.apply(x)


def constant(x: Any) -> Any:
    return x + paddle.to_tensor([1.0, 2.0, 3.0])


def hooked(x: Any) -> Any:
    y = x * 1.0
    if not y.stop_gradient:
        y.register_hook(lambda grad: grad * 3)
    return y


def numbers_of_shape(x: Any) -> Any:
    return x * x.shape[0] / len(x) + paddle.ones([x.shape[0], 1])


def masked(x: Any) -> Any:
    # Never empty, of which 2.6.2 makes no sum.
    mask = x >= x.mean()
    return x + paddle.masked_select(x, mask).sum() + x[mask].mean()


def unique(x: Any) -> Any:
    return x + paddle.unique((x > 0).astype("int32")).astype("float32").sum()


class Model(nn.Layer):  # type: ignore[misc]
    """Code between two layers: in the model's own forward, or in that of a sublayer."""

    def __init__(self, code: Callable[[Any], Any], inside: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.middle = Middle(code) if inside else code

    def forward(self, x: Any) -> Any:
        return self.last(self.middle(self.first(x)))


class Middle(nn.Layer):  # type: ignore[misc]
    """A sublayer with a sublayer, and that code."""

    def __init__(self, code: Callable[[Any], Any]) -> None:
        super().__init__()
        self.code, self.linear = code, nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        return self.code(self.linear(x))


GLUE = [no_grad, detached, by_writing, own_operation, constant, hooked, numbers_of_shape]


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("code", [*GLUE, masked, unique])
def test_glue_is_what_operations_of_paddles_are(code: Callable[[Any], Any], inside: bool) -> None:
    require_bits(lambda: Model(code, inside), [X, LABELS], ["last"], steps=2)


def test_a_layer_that_is_not_opened_says_why() -> None:
    model = Model(branch, True)
    text = str(fleetpipe.explain(model, X[:2]))
    line = branch.__code__.co_firstlineno + 1
    assert f"test_refusals.py:{line}" in text
    assert "not opened: middle: its forward reads the numbers in a tensor" in text
    with pytest.raises(ConfigError, match=r"cuts before middle.linear, where(.|\n)*not opened"):
        fleetpipe.pipeline(model, X[:2], split_spec=["middle.linear"])


def test_a_stage_without_parameters_trains() -> None:
    class Plain(nn.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.act, self.last = nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)

        def forward(self, x: Any) -> Any:
            return self.last(self.act(self.first(x)) * 2)

    require_bits(Plain, [X, LABELS], ["act", "last"])


def test_frozen_layers_and_what_no_node_uses() -> None:
    def build() -> Any:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
        for parameter in model[0].parameters():
            parameter.stop_gradient = True
        model[1].unused = nn.Linear(2, 2)
        return model

    require_bits(build, [X, LABELS], ["1", "2"])


def test_inputs_that_are_no_tensors_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"tensors and plain values(.|\n)*ndarray"):
        fleetpipe.pipeline(Model(constant, False), X.numpy(), split_spec=["last"])
