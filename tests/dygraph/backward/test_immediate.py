"""What cannot wait for W: each such use of a parameter or a tensor, and why it is reported."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleetpipe.errors import ConfigError
from tests.dygraph.backward.leaves import (
    Around,
    Leaf,
    Parent,
    Steps,
    grads_of,
    numbers,
    score,
    shaken,
    shifted,
)
from tests.pipelines import bits


class Box:
    """Hides a tensor."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


class Remembering(nn.BatchNorm1D):
    """Uses a tensor that is not its argument, beside running statistics."""

    def __init__(self) -> None:
        super().__init__(4)
        self.memory: list[Any] = []

    def forward(self, x: Any) -> Any:
        return super().forward(x) + self.memory[0]


def remind(inner: Any, x: Any) -> Any:
    """Hands a tensor on where nobody sees it."""
    inner.memory = [x * 3]
    return inner(x)


class Borrows(nn.Layer):
    """Uses a parameter that is registered elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.head = BorrowedHead(self.linear)

    def forward(self, x: Any) -> Any:
        return self.head(self.linear(x))


class BorrowedHead(nn.Layer):
    def __init__(self, owner: Any) -> None:
        super().__init__()
        self.weights = [owner]
        self.bias = self.create_parameter([4])

    def forward(self, x: Any) -> Any:
        return nn.functional.dropout(x @ self.weights[0].weight, 0.5) + self.bias


def use_twice(inner: Any, x: Any) -> Any:
    """Uses the argument of a layer behind it."""
    y = x * 2
    return inner(y) + y


def write_numbers(x: Any, shift: Any) -> Any:
    x.set_value(x.detach() * 0.5)
    return x + shift


def decay(x: Any, shift: Any) -> Any:
    """Writes into the parameter, in each call once."""
    shift.set_value(shift.detach() * 0.5)
    return x + shift


def stop(x: Any, shift: Any) -> Any:
    y = x + shift
    x.stop_gradient = True
    return y


def hook(x: Any, shift: Any) -> Any:
    y = x * shift
    y.register_hook(lambda grad: grad * 2)
    return y + shift


def compiled() -> Any:
    """A static graph around a leaf layer."""
    inner = paddle.jit.to_static(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    return Around(inner, lambda inner, x: inner(x) * 2)


def boxed_argument() -> Any:
    opens = Leaf(lambda box, weight: box.tensor @ weight, weight=[4, 4])
    return Around(opens, lambda inner, x: inner(Box(x)))


def boxed_result() -> Any:
    boxes = Leaf(lambda x, weight: Box(x @ weight), weight=[4, 4])
    return Around(boxes, lambda inner, x: inner(x).tensor)


IMMEDIATE: dict[str, tuple[Any, str, str]] = {
    "in a static graph": (compiled, "0.inner.0.weight", "within paddle.jit.to_static"),
    "used around its layer": (
        lambda: Around(nn.Linear(4, 4), lambda inner, x: inner(x) @ inner.weight),
        "0.inner.weight",
        "outside of its layer's own forward",
    ),
    "beside a sublayer's": (Parent, "0.shift", "sublayers with parameters of their own"),
    "borrowed parameter": (Borrows, "0.head.bias", "neither its argument nor its own"),
    "hidden tensor": (
        lambda: Around(Remembering(), remind),
        "0.inner.weight",
        "neither its argument nor its own",
    ),
    "boxed argument": (boxed_argument, "0.inner.weight", "called with an object of class Box"),
    "boxed result": (boxed_result, "0.inner.weight", "returned an object of class Box"),
    "returned parameter": (
        lambda: Around(shifted(lambda _, shift: shift), lambda inner, x: x + inner(x)),
        "0.inner.shift",
        "returns a parameter",
    ),
    **{
        kind: (lambda compute=compute: Around(shifted(compute), use_twice), "0.inner.shift", why)
        for kind, compute, why in (
            ("in place", lambda x, shift: x.add_(shift), "cannot run on stand-ins"),
            ("numbers in place", write_numbers, "into its argument"),
            ("parameter in place", decay, "into its parameter"),
            ("gradient off", stop, "of its argument on or off"),
            ("hook inside", hook, "puts a hook"),
        )
    },
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
    assert {k: v for k, v in bits(steps.layer.state_dict()).items() if "_mean" in k} == {
        k: v for k, v in bits(plain.state_dict()).items() if "_mean" in k
    }


class Fickle(nn.Layer):
    """Begins to hand its sublayer a box, or to be given one, in its second call."""

    def __init__(self, inner: Any, later: Any) -> None:
        super().__init__()
        self.inner = inner
        self.later = later
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return self.inner(x if self.calls == 1 else self.later(x))


def either(value: Any, weight: Any) -> Any:
    """Takes a box or a tensor; gives a box for a tensor of other than three rows."""
    box = isinstance(value, Box)
    output = (value.tensor if box else value) @ weight
    return output if box or value.shape[0] == 3 else Box(output)


def test_a_layer_that_is_handed_a_box_later_gets_its_gradient_in_i_then() -> None:
    inputs = [numbers(3, 4, seed=k) for k in range(3)]
    steps, plain = (
        Steps(Fickle(Leaf(either, weight=[4, 4]), Box)),
        Fickle(Leaf(either, weight=[4, 4]), Box),
    )
    plain.set_state_dict(steps.layer.state_dict())
    for k, x in enumerate(inputs):
        score(plain(x)).backward()
        steps.input_grads(k, score(steps.forward(k, x)))
        steps.weight_grads(k)
    assert grads_of(steps.layer) == grads_of(plain)
    assert "object of class Box" in steps.report().immediate["0.inner.weight"]


def test_a_layer_that_returns_a_box_later_is_refused_rather_than_wrong() -> None:
    steps = Steps(Fickle(Leaf(either, weight=[4, 4]), lambda x: x[:2]))
    steps.forward(0, numbers(3, 4))
    with pytest.raises(ConfigError, match=r"'0\.inner' could wait for W, and now cannot"):
        steps.forward(1, numbers(3, 4))
