"""What cannot wait for W: each such use of a parameter or a tensor, and why it is reported."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet.utils import recompute

from tests.dygraph.backward.leaves import (
    Around,
    Leaf,
    Parent,
    Steps,
    fused_and_split,
    grads_of,
    numbers,
    score,
    shaken,
    shifted,
)


def compiled() -> Any:
    """A static graph around a leaf layer."""
    inner = paddle.jit.to_static(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    return Around(inner, lambda inner, x: inner(x) * 2)


class Masked(nn.Linear):
    """A Linear by its forward, whose weight is computed."""

    def __init__(self) -> None:
        nn.Layer.__init__(self)
        self.kernel = self.create_parameter([4, 4])
        self.bias, self.name = self.create_parameter([4]), None

    @property
    def weight(self) -> Any:
        return self.kernel * 2


IMMEDIATE: dict[str, tuple[Any, str, str]] = {
    "in a static graph": (compiled, "0.inner.0.weight", "within paddle.jit.to_static"),
    "used around its layer": (
        lambda: Around(nn.Linear(4, 4), lambda inner, x: inner(x) @ inner.weight),
        "0.inner.weight",
        "outside of its layer's own forward",
    ),
    "beside a sublayer's": (Parent, "0.shift", "sublayers with parameters of their own"),
    "a forward of its own": (shifted, "0.shift", "the model's own"),
    "weight_norm": (
        lambda: nn.utils.weight_norm(nn.Linear(4, 4)),
        "0.weight_g",
        "a tensor that is computed",
    ),
    "a property for a weight": (Masked, "0.kernel", "the model's own"),
}


@pytest.mark.parametrize("kind", IMMEDIATE)
def test_what_cannot_wait_gets_its_gradient_in_i_and_is_reported(kind: str) -> None:
    make, name, reason = IMMEDIATE[kind]
    inputs = [numbers(6, 4, seed=k) for k in range(3)]
    paddle.seed(5)
    plain = shaken(make())
    steps = Steps(make())
    steps.layer.set_state_dict(plain.state_dict())
    for k, x in enumerate(inputs):
        y = x.detach()
        y.stop_gradient = False
        paddle.seed(k)
        score(plain(y)).backward()
        paddle.seed(k)
        steps.input_grads(k, score(steps.forward(k, x)))
        assert x.grad.numpy().tobytes() == y.grad.numpy().tobytes()
        steps.weight_grads(k)
    assert reason in steps.report().immediate[name]
    trained = [p for p in steps.layer.parameters() if not p.stop_gradient]
    for ours, theirs in zip(trained, (p for p in plain.parameters() if not p.stop_gradient)):
        np.testing.assert_allclose(ours.grad.numpy(), theirs.grad.numpy(), rtol=1e-6, atol=1e-6)


class Changing(nn.Layer):
    """Weights that it has itself, and what each call does with them, by its number."""

    def __init__(self, *ways: Any) -> None:
        super().__init__()
        self.before, self.ways, self.calls = nn.Linear(4, 4), ways, -1
        self.inner = Leaf(self.chosen, weight=[4, 4], shift=[4])
        self.kept: Any = None

    def chosen(self, x: Any, *parameters: Any) -> Any:
        self.calls += 1
        return self.ways[min(self.calls, len(self.ways) - 1)](self, x, *parameters)

    def forward(self, x: Any) -> Any:
        y = self.inner(self.before(x))
        return (y["y"] if isinstance(y, dict) else y) + (0 if self.kept is None else self.kept)


def plainly(_: Any, x: Any, weight: Any, shift: Any) -> Any:
    return x @ weight + shift


def beside(owner: Any, x: Any, weight: Any, shift: Any) -> Any:
    owner.kept = (x * x).mean() + (x @ weight).sum()
    return x @ weight + shift


def remembering(owner: Any, x: Any, weight: Any, shift: Any) -> Any:
    y = x @ weight + (shift if owner.calls == 0 else shift * owner.memory)
    owner.memory = y.detach()
    return y


def norm(_: Any, x: Any, weight: Any, shift: Any) -> Any:
    return nn.functional.layer_norm(x, [4], shift, shift) @ weight


#: What the calls of a leaf do, one after another.
WAYS: dict[str, tuple[Any, ...]] = {
    "returns its input at first": (lambda _, x, *__: x, plainly),
    "returns its input later": (plainly, lambda _, x, *__: x),
    "looks at its input later": (lambda _, x, weight, shift: x.detach() @ weight, plainly),
    "looks away later": (plainly, lambda _, x, weight, shift: x.detach() @ weight + shift),
    "without gradients later": (
        plainly,
        lambda _, x, *parts: paddle.no_grad()(plainly)(_, x, *parts) + x,
    ),
    "layer_norm later": (plainly, norm),
    "prelu later": (
        plainly,
        lambda _, x, weight, shift: nn.functional.prelu(x @ weight, shift[:1]),
    ),
    "a dict later": (plainly, lambda *parts: {"y": plainly(*parts)}),
    "one parameter later": (plainly, lambda _, x, weight, shift: x @ weight),
    "keeps something beside": (beside,),
    "keeps something beside later": (plainly, beside),
    "a memory": (remembering,),
}


@pytest.mark.parametrize("kind", WAYS)
def test_a_leaf_that_does_something_else_in_each_call_has_the_bits_of_autograd(kind: str) -> None:
    inputs = [numbers(3, 4, seed=k) for k in range(3)]
    expected, got, steps = fused_and_split(lambda: Changing(*WAYS[kind]), inputs, all_wait=False)
    assert got == expected
    assert steps.layer.calls == len(inputs) - 1


def shadow_weight(layer: Any, _: Any) -> None:
    layer.__dict__["weight"] = layer._parameters["weight"] * layer.bias


def fast_weight(layer: Any, _: Any) -> None:
    layer._parameters["weight"] = paddle.eye(4) * layer.bias


def replace_weight(layer: Any) -> None:
    weight = layer.create_parameter([4, 4])
    weight.set_value(paddle.eye(4))
    layer.weight = weight


#: What happens to a Linear after its first call.
LATER: dict[str, Any] = {
    "weight_norm": nn.utils.weight_norm,
    "a forward of its own": lambda layer: setattr(
        layer, "forward", lambda x: x.detach() @ layer.weight
    ),
    "an attribute for a weight": lambda layer: layer.register_forward_pre_hook(shadow_weight),
    "a result for a parameter": lambda layer: layer.register_forward_pre_hook(fast_weight),
    "another parameter": replace_weight,
    "a frozen bias": lambda layer: setattr(layer.bias, "stop_gradient", True),
}


@pytest.mark.parametrize("kind", LATER)
def test_a_linear_that_is_changed_between_calls_has_the_bits_of_autograd(kind: str) -> None:
    def stack() -> Any:
        return shaken(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)))

    paddle.seed(3)
    plain = stack()
    paddle.seed(3)
    steps = Steps(stack())
    for k in range(3):
        if k == 1:
            LATER[kind](plain[1])
            LATER[kind](steps.layer[1])
        score(plain(numbers(3, 4, seed=k))).backward()
        steps.input_grads(k, score(steps.forward(k, numbers(3, 4, seed=k))))
        steps.weight_grads(k)
        assert grads_of(steps.layer) == grads_of(plain)


@pytest.mark.parametrize("first", [False, True])
def test_layers_within_saved_tensors_hooks_run_as_they_are(first: bool) -> None:
    def some(linear: Any, x: Any) -> Any:
        if first or linear.calls:
            y = recompute(linear, x, use_reentrant=False, preserve_rng_state=False)
        else:
            y = linear(x)
        linear.calls += 1
        return y

    class Counted(Around):
        def __init__(self) -> None:
            super().__init__(nn.Linear(4, 4), some)
            self.inner.calls = 0

    inputs = [numbers(3, 4, seed=k) for k in range(3)]
    expected, got, steps = fused_and_split(Counted, inputs, all_wait=False)
    assert got == expected
    assert "saved_tensors_hooks" in steps.report().immediate["0.inner.weight"]
