"""Hooks, writes in place, gradients switched off, and derivatives have the bits of a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe.errors import BoundaryError, ConfigError
from tests.dygraph.models import Called, Leaf
from tests.dygraph.train.test_random_lists import train_beside_a_loop
from tests.pipelines import CLASSES, FEATURES, batch, job, pipeline


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


IDIOMS = {**HOOKS, **STOPS, **WRITES}
SCHEDULES = ["1F1B", "Interleaved1F1B", "ZBH1", "ZBV"]


def require_bits(
    make: Callable[[], list[Any]], schedule: str, loss_fn: Callable[[Any, Any], Any]
) -> None:
    """Trains a list of layers two steps, and a plain loop."""
    with job(2, 3, schedule):
        paddle.seed(5)
        model = pipeline(make(), loss_fn=loss_fn)
        train_beside_a_loop(model, lambda step: batch(3, step), 3, loss_fn=loss_fn)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("idiom", IDIOMS)
def test_what_is_done_around_layers_has_the_bits_of_a_plain_loop(idiom: str, schedule: str) -> None:
    require_bits(lambda: layers_of(IDIOMS[idiom]), schedule, nn.CrossEntropyLoss())


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
