"""I and W against autograd, by layer and in pipelines: bits, what waits, memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet.utils import recompute

from fleetpipe.errors import ConfigError
from fleetpipe.fleet.meta_parallel import LayerDesc
from tests.dygraph.models import (
    Called,
    Leaf,
    Steps,
    fused_and_split,
    grads_of,
    numbers,
    score,
    shaken,
)
from tests.pipelines import batch, mlp_layers, model_in_job, train


def thrice(x: Any, linear: Any) -> Any:
    """One layer called three times, with residuals around it."""
    y = x + paddle.tanh(linear(x))
    y = y + linear(y)
    return y - linear(y * 2)


def tied() -> Any:
    """Two layers with one weight."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second)


class Initialized(nn.Linear):
    """Has another constructor, and a method that a Linear has not."""

    def __init__(self) -> None:
        super().__init__(4, 5)
        self.reset()

    def reset(self) -> None:
        self.weight.set_value(paddle.eye(4, 5))


Case = tuple[Callable[[], Any], tuple[int, ...]]

#: Layers whose weight gradient is computed in W, with the shape of their input.
APART: dict[str, Case] = {
    "Linear": (lambda: nn.Linear(4, 5), (3, 4)),
    "Linear without bias": (lambda: nn.Linear(4, 5, bias_attr=False), (2, 3, 4)),
    "Conv1D": (lambda: nn.Conv1D(2, 3, 3), (2, 2, 8)),
    "Conv2D": (lambda: nn.Conv2D(2, 3, 3), (2, 2, 6, 6)),
    "Conv2D by group": (lambda: nn.Conv2D(4, 4, 3, groups=4), (2, 4, 6, 6)),
    "Conv3D": (lambda: nn.Conv3D(2, 3, 3), (2, 2, 5, 5, 5)),
    "Conv2DTranspose": (lambda: nn.Conv2DTranspose(2, 3, 3), (2, 2, 5, 5)),
    "LSTMCell": (lambda: nn.LSTMCell(3, 4), (2, 3)),
    "GRUCell": (lambda: nn.GRUCell(3, 4), (2, 3)),
    "MultiHeadAttention": (lambda: nn.MultiHeadAttention(8, 2), (2, 3, 8)),
    "Linear with another constructor": (Initialized, (3, 4)),
    "called three times": (lambda: Called(thrice, nn.Linear(4, 4)), (3, 4)),
    "tied weights": (tied, (3, 4)),
    "recomputed": (
        lambda: Called(
            lambda x, inner: recompute(inner, x),
            nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)),
        ),
        (3, 4),
    ),
    "a large output": (lambda: nn.Conv1D(1, 2, 1), (2, 1, 2**17)),
}

#: Layers whose gradients Paddle gives together only.
TOGETHER: dict[str, Case] = {
    "BatchNorm1D, one row": (lambda: nn.BatchNorm1D(4), (1, 4)),
    "LayerNorm": (lambda: nn.LayerNorm(4), (3, 4)),
    "PReLU": (lambda: nn.PReLU(4), (2, 4, 3, 3)),
}


@pytest.mark.parametrize("kind", APART)
def test_weight_gradients_that_wait_have_the_bits_of_autograd(kind: str) -> None:
    make, shape = APART[kind]
    expected, got, steps = fused_and_split(make, [numbers(*shape, seed=k) for k in range(3)])
    assert got == expected
    assert len(steps.gradients_in_w()) == sum(not p.stop_gradient for p in steps.layer.parameters())


@pytest.mark.parametrize("kind", TOGETHER)
def test_gradients_that_come_together_do_not_wait(kind: str) -> None:
    make, shape = TOGETHER[kind]
    inputs = [numbers(*shape, seed=k) for k in range(3)]
    expected, got, steps = fused_and_split(make, inputs, all_wait=False)
    assert got == expected
    assert steps.gradients_in_w() == []


def test_a_layer_is_looked_at_again_when_the_one_before_is_unfrozen() -> None:
    plain = shaken(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)))
    steps = Steps(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)))
    steps.layer.set_state_dict(plain.state_dict())
    for k in range(3):
        x = numbers(3, 4, seed=k).detach()
        for layer in (plain, steps.layer):
            for parameter in layer[0].parameters():
                parameter.stop_gradient = k == 0
        score(plain(x)).backward()
        steps.input_grads(k, score(steps.forward(k, x)))
        steps.weight_grads(k)
        assert grads_of(steps.layer) == grads_of(plain)


def root_mean_square() -> Leaf:
    """A vector of its own, and an input that it uses twice."""
    return Leaf(
        lambda x, weight: x * paddle.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight,
        weight=[4],
    )


def attention(x: Any, query: Any, key: Any, value: Any) -> Any:
    weights = nn.functional.softmax(query(x) @ key(x).transpose([1, 0]))
    return weights @ value(x)


def without_bias() -> Any:
    return nn.Linear(4, 4, bias_attr=False)


#: Three and more gradients of one tensor: their order decides about the last bit.
SUMS: dict[str, Callable[[], Any]] = {
    "Linear": lambda: Called(lambda x, fc: fc(x) + x * 0.5 + x, nn.Linear(4, 4)),
    "Linear without bias": lambda: Called(lambda x, fc: fc(x) + x * 0.5 + x, without_bias()),
    "Conv1D": lambda: Called(
        lambda x, conv: (conv(x[None]) + x[None] * 0.5 + x[None])[0], nn.Conv1D(8, 8, 1)
    ),
    "RMSNorm": lambda: Called(
        lambda x, norm, fc: x + fc(norm(x)), root_mean_square(), without_bias()
    ),
    "parallel blocks": lambda: Called(
        lambda x, norm, up, down, *qkv: (
            attention(norm(x), *qkv) + down(nn.functional.gelu(up(norm(x)))) + x
        ),
        *(nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)),
        *(without_bias() for _ in range(3)),
    ),
    "one norm for both": lambda: Called(
        lambda x, norm, both: both(norm(x)) + x,
        nn.LayerNorm(4),
        Called(
            lambda n, up, down, *qkv: attention(n, *qkv) + down(nn.functional.gelu(up(n))),
            *(nn.Linear(4, 8), nn.Linear(8, 4)),
            *(without_bias() for _ in range(3)),
        ),
    ),
}


@pytest.mark.parametrize("kind", SUMS)
@pytest.mark.parametrize("seed", range(3))
def test_gradients_are_added_up_in_the_order_of_autograd(kind: str, seed: int) -> None:
    inputs = [numbers(8, 4, seed=3 * seed + k) for k in range(3)]
    norms = ("RMSNorm", "parallel blocks", "one norm for both")
    expected, got, _ = fused_and_split(SUMS[kind], inputs, all_wait=kind not in norms)
    assert got == expected


@pytest.mark.parametrize("sparse", [False, True])
def test_embedding_has_no_input_gradient_and_still_waits(sparse: bool) -> None:
    ids = [paddle.to_tensor([[k, 2, 2]]) for k in range(3)]
    expected, got, steps = fused_and_split(lambda: nn.Embedding(6, 4, sparse=sparse), ids)
    assert got[1:] == expected[1:]
    assert steps.gradients_in_w() == ["0.weight"]


def frozen_in_part() -> Any:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for parameter in (layers[0].weight, *layers[1].parameters()):
        parameter.stop_gradient = True
    return layers


#: Layers of which not everything gets a gradient, and the names of what gets one in W.
IN_PART: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "the input gets none": (lambda: nn.Linear(4, 5), ["0.weight", "0.bias"]),
    "frozen": (frozen_in_part, ["0.0.bias"]),
    "unused": (
        lambda: Called(lambda x, a, b: (a(x), b(x))[0], nn.Linear(4, 4), nn.Linear(4, 4)),
        ["0.parts.0.weight", "0.parts.0.bias"],
    ),
}


@pytest.mark.parametrize("kind", IN_PART)
def test_what_gets_no_gradient_from_autograd_gets_none(kind: str) -> None:
    make, in_w = IN_PART[kind]
    inputs = [numbers(3, 4, seed=k) for k in range(3)]
    for x in inputs:
        x.stop_gradient = kind == "the input gets none"
    expected, got, steps = fused_and_split(make, inputs)
    assert got == expected
    assert steps.gradients_in_w() == in_w


def test_outside_of_a_stages_forward_layers_have_their_own() -> None:
    layer = nn.Linear(4, 4)
    plain, steps, x = layer.forward, Steps(layer), numbers(3, 4)
    inside = []
    handle = layer.register_forward_pre_hook(
        lambda layer, _: inside.append("forward" in layer.__dict__)
    )
    steps.forward(0, x)
    layer(x)
    handle.remove()
    assert inside == [True, False]
    with steps.split.recording(0, 1), paddle.no_grad():
        assert layer(x).stop_gradient
    for _ in range(2):
        with pytest.raises(ValueError, match=r"(?i)dim|shape|mul"):
            steps.forward(0, numbers(3, 5))
    assert "forward" not in layer.__dict__
    layer.forward = mine = lambda x: plain(x) * 2
    expected = layer(x).numpy().tobytes()
    assert steps.forward(0, x).numpy().tobytes() == expected
    assert layer.forward is mine


def test_hooks_of_parameters_run_once_for_each_micro_batch_in_w() -> None:
    layer = nn.Linear(4, 4)
    calls: list[str] = []
    phase = ["F"]

    def double(grad: Any) -> Any:
        calls.append(phase[0])
        return grad * 2

    layer.weight.register_hook(double)
    steps = Steps(layer)
    x = numbers(3, 4)
    root = score(steps.forward(0, x))
    phase[0] = "I"
    steps.input_grads(0, root)
    phase[0] = "W"
    steps.weight_grads(0)
    ours = layer.weight.grad.numpy()
    layer.clear_gradients()
    score(layer(numbers(3, 4))).backward()
    assert calls == ["W", "W"]
    assert ours.tobytes() == layer.weight.grad.numpy().tobytes()


def test_an_output_with_a_hook_dies_without_the_garbage_collector() -> None:
    outputs: list[Any] = []

    def noted(x: Any, fc: Any) -> Any:
        y = fc(x)
        y.register_hook(lambda grad: grad * 2)
        outputs.append(weakref.ref(y))
        return paddle.tanh(y)

    gc.disable()
    try:
        fused_and_split(lambda: Called(noted, nn.Linear(4, 4)), [numbers(3, 4)])
        assert len(outputs) >= 2
        assert all(output() is None for output in outputs)
    finally:
        gc.enable()


class Chosen(nn.Layer):
    """Two experts, of which one gets no rows, as where nobody chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return self.one(x) + self.one(x[:0]).sum() + self.other(x[:0]).sum()


@pytest.mark.skipif(paddle.__version__ < "3", reason="2.6.2 refuses a product without rows")
def test_a_linear_without_rows_has_the_bits_of_a_whole_backward() -> None:
    layers = [LayerDesc(nn.Linear, 6, 8), *[LayerDesc(Chosen)] * 2, LayerDesc(nn.Linear, 8, 4)]
    plain = train(layers, 1, gradients=True)
    assert "1.other.weight" in plain.gradients
    assert train(layers, 2, "ZBH1", gradients=True) == plain


def test_everything_is_dropped_after_w() -> None:
    from fleetpipe.paddle_api.device import allocated_bytes

    with model_in_job(2, 8, "ZBH1", layers=mlp_layers(hidden=64)) as model:
        data = batch(8)
        for _ in range(2):
            model.forward_backward_pipeline(data)
        gc.collect()  # of the tests before this one
        before = allocated_bytes()
        for _ in range(3):
            model.forward_backward_pipeline(data)
        assert allocated_bytes() == before


class Patching(nn.Layer):
    """Puts another forward in the place of its sublayer's, in the first call."""

    def __init__(self) -> None:
        super().__init__()
        # So wide that its forward is replaced even where no backward is split.
        self.inner = nn.Linear(4, 256)

    def forward(self, x: Any) -> Any:
        y, forward = self.inner(x), self.inner.forward
        self.inner.forward = lambda x: forward(x) + 1
        return y


@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
def test_another_forward_that_comes_within_a_forward_is_refused(schedule: str) -> None:
    with pytest.raises(ConfigError, match="replace it before the batch"):
        train([*mlp_layers(), LayerDesc(Patching)], schedule=schedule)
