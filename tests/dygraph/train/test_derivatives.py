"""Forwards and losses that differentiate: within one stage they are right, elsewhere refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe.errors import BoundaryError, ConfigError
from tests.dygraph.idioms import Called, linear
from tests.dygraph.train.test_idioms import require_bits
from tests.pipelines import CLASSES, FEATURES, batch, job, pipeline


def with_derivative(x: Any, first: Any, second: Any) -> Any:
    """The output, and its derivative by the input."""
    x = x.detach()
    x.stop_gradient = False
    y = second(paddle.tanh(first(x)))
    (derivative,) = paddle.grad(y.sum(), [x], create_graph=True)
    return y + derivative


def with_input(x: Any, fc: Any) -> Any:
    x = paddle.tanh(x)
    return fc(x), x


def of_physics(output: Any, labels: Any) -> Any:
    """A loss that differentiates the output by an earlier tensor."""
    y, x = output
    (derivative,) = paddle.grad(y.sum(), [x], create_graph=True)
    return nn.functional.cross_entropy(y, labels) + (derivative**2).mean()


def within_a_layer() -> list[Any]:
    inner = Called(with_derivative, linear(), linear())
    return [linear(), inner, linear(), nn.Linear(FEATURES, CLASSES)]


def within_the_last_stage() -> list[Any]:
    return [linear(), linear(), linear(), Called(with_input, nn.Linear(FEATURES, CLASSES))]


def across_stages() -> list[Any]:
    return [
        linear(),
        Called(with_input, linear()),
        Called(lambda pair, fc: (paddle.tanh(fc(pair[0])), pair[1]), linear()),
        Called(lambda pair, fc: (fc(pair[0]), pair[1]), nn.Linear(FEATURES, CLASSES)),
    ]


Make = Callable[[], list[Any]]
HERE: list[tuple[Make, Any]] = [
    (within_a_layer, nn.functional.cross_entropy),
    (within_the_last_stage, of_physics),
]


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
@pytest.mark.parametrize(("make", "loss_fn"), HERE)
def test_within_one_stage_it_has_the_bits_of_a_plain_loop(
    make: Make, loss_fn: Any, schedule: str
) -> None:
    require_bits(make, schedule, loss_fn)


@pytest.mark.parametrize(("make", "loss_fn"), HERE)
def test_under_a_split_backward_it_is_refused(make: Make, loss_fn: Any) -> None:
    with job(2, 3, "ZBH1"):
        model = pipeline(make(), loss_fn=loss_fn)
        with pytest.raises(ConfigError, match="whose backward is split") as refused:
            model.forward_backward_pipeline(batch(3))
    assert "without W" in str(refused.value)


@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
def test_a_loss_that_differentiates_across_stages_is_told_so(schedule: str) -> None:
    with job(2, 3, schedule):
        model = pipeline(across_stages(), loss_fn=of_physics)
        with pytest.raises(BoundaryError, match="differentiates by a tensor") as refused:
            model.forward_backward_pipeline(batch(3))
    assert "labels" not in str(refused.value)
    assert "one layer of the list" in str(refused.value)


def test_a_layer_that_differentiates_across_stages_is_told_so() -> None:
    layers = across_stages()
    layers.append(Called(lambda pair: paddle.grad(pair[0].sum(), [pair[1]])[0] + pair[0][:, :1]))
    with job(2, 3):
        model = pipeline(layers, loss_fn=nn.CrossEntropyLoss())
        with pytest.raises(BoundaryError, match=r"layer 4 \(Called\) differentiates by"):
            model.forward_backward_pipeline(batch(3))
