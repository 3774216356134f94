"""I and W of single layers as a stage runs them, and the small layers that tests do it with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import nn

from fleetpipe.dygraph.backward.deferral_report import DeferralReport
from fleetpipe.dygraph.backward.split import SplitBackward
from fleetpipe.schedules import Schedule, build
from tests.pipelines import bits

ONE_STAGE: Schedule = build("ZBH1", ranks=1, micro_batches=3)


def numbers(*shape: int, seed: int = 0) -> Any:
    """A tensor that needs a gradient."""
    values = np.random.default_rng(seed).standard_normal(shape).astype("float32")
    return paddle.to_tensor(values, stop_gradient=False)


def shaken(layer: Any) -> Any:
    """The layer with parameters that are no longer what it began with."""
    for seed, parameter in enumerate(layer.parameters()):
        if not parameter.stop_gradient:
            moved = numbers(*parameter.shape, seed=seed + 9).detach()
            parameter.set_value(parameter + moved.astype(parameter.dtype))
    return layer


class Steps:
    """Runs forward, I and W of one layer as a stage does."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.split = SplitBackward(ONE_STAGE, lambda stage: {0: layer})

    def forward(self, micro_batch: int, *inputs: Any) -> Any:
        with self.split.recording(0, micro_batch):
            return self.layer(*inputs)

    def input_grads(self, micro_batch: int, root: Any) -> None:
        with self.split.input_grads(0, micro_batch):
            root.backward()

    def weight_grads(self, micro_batch: int) -> None:
        self.split.weight_grads(0, micro_batch)
        self.split.release(0, micro_batch)

    def report(self) -> DeferralReport:
        return self.split.report()


def score(output: Any) -> Any:
    """A number whose gradient differs from element to element."""
    if isinstance(output, (tuple, list)):
        return sum(map(score, output), paddle.zeros([]))
    weights = paddle.arange(output.size, dtype="float32").reshape(output.shape)
    return (output * paddle.sin(weights + 1)).sum()


def grads_of(layer: Any) -> list[bytes | None]:
    return [None if p.grad is None else p.grad.numpy().tobytes() for p in layer.parameters()]


class Leaf(nn.Layer):
    """Parameters of its own, by name and shape, and what is computed with an input and them."""

    def __init__(self, compute: Callable[..., Any], **shapes: Sequence[int]) -> None:
        super().__init__()
        self.compute = compute
        for name, shape in shapes.items():
            setattr(self, name, self.create_parameter(shape))

    def forward(self, x: Any) -> Any:
        return self.compute(x, *self._parameters.values())


class Called(nn.Layer):
    """Layers, and how they are called."""

    def __init__(self, call: Callable[..., Any], *parts: Any) -> None:
        super().__init__()
        self.call, self.parts = call, nn.LayerList(parts)

    def forward(self, x: Any) -> Any:
        return self.call(x, *self.parts)


class Around(nn.Layer):
    """A layer, and how it is called."""

    def __init__(self, inner: Any, call: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x: Any) -> Any:
        return self.call(self.inner, x)


class Parent(nn.Layer):
    """Has a parameter of its own beside a sublayer's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.shift = self.create_parameter([4])

    def forward(self, x: Any) -> Any:
        return self.linear(x) + self.shift


def shifted(compute: Callable[..., Any] = paddle.add) -> Leaf:
    """A leaf with one vector; by default its input's gradient is its output's gradient itself."""
    return Leaf(compute, shift=[4])


def fused_and_split(
    make: Callable[[], Any], inputs: list[Any], all_wait: bool = True
) -> tuple[Any, Any, Steps]:
    """Gradients of inputs and parameters, and buffers: by autograd, and with all W at the end."""
    paddle.seed(5)
    plain = shaken(make())
    paddle.seed(5)
    steps = Steps(shaken(make()))
    results = []
    for x in inputs:
        y = x.detach()
        y.stop_gradient = x.stop_gradient
        score(plain(y)).backward()
        results.append(y)
    for k, x in enumerate(inputs):
        root = score(steps.forward(k, x))
        steps.input_grads(k, root)
    assert all(grad is None for grad in grads_of(steps.layer)) == all_wait
    for k in range(len(inputs)):
        steps.weight_grads(k)
    expected = ([x.grad for x in results], grads_of(plain), bits(plain.state_dict()))
    got = ([x.grad for x in inputs], grads_of(steps.layer), bits(steps.layer.state_dict()))
    for pair in (expected, got):
        pair[0][:] = [None if grad is None else grad.numpy().tobytes() for grad in pair[0]]
    return expected, got, steps
