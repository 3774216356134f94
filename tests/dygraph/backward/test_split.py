"""I and W of single layers against autograd: bits, what waits, what does not and why, bytes."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet.utils import recompute

from fleetpipe.dygraph.backward.deferral_report import DeferralReport
from fleetpipe.dygraph.backward.split import SplitBackward
from fleetpipe.errors import BoundaryError, ConfigError
from fleetpipe.fleet.meta_parallel import LayerDesc
from fleetpipe.schedules import Schedule, build
from tests.pipelines import batch, bits, job, mlp_layers, pipeline, sgd, train

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


class Scaled(nn.Layer):
    """Parameters of its own, used without any layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = self.create_parameter([4])
        self.shift = self.create_parameter([4], is_bias=True)

    def forward(self, x: Any) -> Any:
        return x * self.scale + self.shift


class Shifted(nn.Layer):
    """Its input's gradient is its output's gradient itself."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = self.create_parameter([4])

    def forward(self, x: Any) -> Any:
        return x + self.shift


class Twice(nn.Layer):
    """One layer called three times, with residuals around it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.shifted = nn.Linear(4, 4), Shifted()

    def forward(self, x: Any) -> Any:
        y = x + paddle.tanh(self.linear(x))
        y = y + self.shifted(self.linear(y))
        return y - self.linear(self.shifted(y))


class Tied(nn.Layer):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Any) -> Any:
        return self.second(paddle.tanh(self.first(x)))


class Keywords(nn.Layer):
    """Takes and returns nested values, some with no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([4, 4])

    def forward(self, pair: Any, *, mask: Any = None, name: str = "") -> Any:
        left, (right, step) = pair
        return {"left": left @ self.weight * mask, "count": step, "both": (right, left + right)}


class CallsKeywords(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Keywords()

    def forward(self, x: Any) -> Any:
        out = self.inner([x, (x * 2, 3)], mask=paddle.ones([4]), name="a")
        return out["left"] * out["count"] + out["both"][0] + out["both"][1]


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
    "own parameters": (Scaled, (3, 4)),
    "alias of its gradient": (Shifted, (3, 4)),
    "called three times": (Twice, (3, 4)),
    "tied weights": (Tied, (3, 4)),
}

#: Layers whose gradients Paddle gives together only.
TOGETHER: dict[str, Case] = {
    "BatchNorm1D": (lambda: nn.BatchNorm1D(4), (6, 4)),
    "BatchNorm1D, one row": (lambda: nn.BatchNorm1D(4), (1, 4)),
    "BatchNorm2D": (lambda: nn.BatchNorm2D(2), (2, 2, 4, 4)),
    "BatchNorm2D, one value": (lambda: nn.BatchNorm2D(2), (1, 2, 1, 1)),
    "LayerNorm": (lambda: nn.LayerNorm(4), (3, 4)),
    "LayerNorm without bias": (lambda: nn.LayerNorm(4, bias_attr=False), (3, 4)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (2, 4, 3, 3)),
    "InstanceNorm2D": (lambda: nn.InstanceNorm2D(4), (2, 4, 3, 3)),
    "PReLU": (lambda: nn.PReLU(4), (2, 4, 3, 3)),
    "weight_norm": (lambda: nn.utils.weight_norm(nn.Linear(4, 5)), (3, 4)),
}


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


@pytest.mark.parametrize("kind", APART)
def test_weight_gradients_that_wait_have_the_bits_of_autograd(kind: str) -> None:
    make, shape = APART[kind]
    expected, got, steps = fused_and_split(make, [numbers(*shape, seed=k) for k in range(3)])
    assert got == expected
    assert steps.report().immediate == {}
    assert len(steps.report().deferred) == len(steps.layer.parameters()) - sum(
        p.stop_gradient for p in steps.layer.parameters()
    )


@pytest.mark.parametrize("kind", TOGETHER)
def test_gradients_that_come_together_do_not_wait(kind: str) -> None:
    make, shape = TOGETHER[kind]
    inputs = [numbers(*shape, seed=k) for k in range(3)]
    expected, got, steps = fused_and_split(make, inputs, all_wait=False)
    assert got == expected
    assert {(entry.computed, entry.added) for entry in steps.report().parameters} == {("I", "I")}
    assert "together with the input's" in next(iter(steps.report().immediate.values()))


class Chain(nn.Layer):
    """Layers, and how they are called."""

    def __init__(self, call: Callable[..., Any], *layers: Any) -> None:
        super().__init__()
        self.call, self.layers = call, nn.LayerList(layers)

    def forward(self, x: Any) -> Any:
        return self.call(x, *self.layers)


NORMS: dict[str, Case] = {
    "LayerNorm": (lambda: nn.LayerNorm(4), (3, 4)),
    "BatchNorm2D": (lambda: nn.BatchNorm2D(4), (1, 4, 1, 1)),
}
if paddle.__version__ >= "3":
    # On 2.6.2 its own backward crashes on an input without gradient.
    NORMS["GroupNorm"] = (lambda: nn.GroupNorm(2, 4), (3, 4, 2, 2))

#: What a layer is first called on needs no gradient, what it is called on later does.
LATER: dict[str, Callable[[Any, Any], Any]] = {
    "stands twice": lambda x, norm: norm(norm(x.detach()) * 3),
    "on a copy first": lambda x, norm: norm(x.detach()) + norm(x * 2),
}


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("later", LATER)
def test_a_layer_is_looked_at_again_when_its_input_needs_a_gradient(kind: str, later: str) -> None:
    make, shape = NORMS[kind]
    inputs = [numbers(*shape, seed=k) for k in range(3)]
    make_both = lambda: Chain(LATER[later], make())  # noqa: E731
    expected, got, steps = fused_and_split(make_both, inputs, all_wait=False)
    assert got == expected
    assert {entry.computed for entry in steps.report().parameters} == {"I"}


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


class RootMeanSquare(nn.Layer):
    """A vector of its own, and an input that it uses twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([4])

    def forward(self, x: Any) -> Any:
        return x * paddle.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * self.weight


def attention(x: Any, query: Any, key: Any, value: Any) -> Any:
    weights = nn.functional.softmax(query(x) @ key(x).transpose([1, 0]))
    return weights @ value(x)


def without_bias() -> Any:
    return nn.Linear(4, 4, bias_attr=False)


#: Three and more gradients of one tensor: their order decides about the last bit.
SUMS: dict[str, Callable[[], Any]] = {
    "Linear": lambda: Chain(lambda x, fc: fc(x) + x * 0.5 + x, nn.Linear(4, 4)),
    "Linear without bias": lambda: Chain(lambda x, fc: fc(x) + x * 0.5 + x, without_bias()),
    "Conv1D": lambda: Chain(
        lambda x, conv: (conv(x[None]) + x[None] * 0.5 + x[None])[0], nn.Conv1D(8, 8, 1)
    ),
    "own parameters": lambda: Chain(lambda x, own: x * 3 + own(x) + paddle.tanh(x * 0.5), Scaled()),
    "RMSNorm": lambda: Chain(lambda x, norm, fc: x + fc(norm(x)), RootMeanSquare(), without_bias()),
    "parallel blocks": lambda: Chain(
        lambda x, norm, up, down, *qkv: (
            attention(norm(x), *qkv) + down(nn.functional.gelu(up(norm(x)))) + x
        ),
        *(nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)),
        *(without_bias() for _ in range(3)),
    ),
    "one norm for both": lambda: Chain(
        lambda x, norm, both: both(norm(x)) + x,
        nn.LayerNorm(4),
        Chain(
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


def test_nested_values_and_keywords_pass_through() -> None:
    expected, got, steps = fused_and_split(CallsKeywords, [numbers(3, 4, seed=k) for k in range(3)])
    assert got[1:] == expected[1:]
    # The layer adds up its own uses of an input before the others': another order of the same sum.
    for ours, theirs in zip(got[0], expected[0]):
        np.testing.assert_allclose(
            np.frombuffer(ours, "float32"), np.frombuffer(theirs, "float32"), rtol=1e-6
        )
    assert steps.report().immediate == {}


@pytest.mark.parametrize("sparse", [False, True])
def test_embedding_has_no_input_gradient_and_still_waits(sparse: bool) -> None:
    ids = [paddle.to_tensor([[k, 2, 2]]) for k in range(3)]
    expected, got, steps = fused_and_split(lambda: nn.Embedding(6, 4, sparse=sparse), ids)
    assert got[1:] == expected[1:]
    assert steps.report().deferred == ("0.weight",)


def test_inputs_without_gradient_need_none() -> None:
    inputs = [numbers(3, 4, seed=k).detach() for k in range(3)]
    expected, got, steps = fused_and_split(lambda: nn.Linear(4, 5), inputs)
    assert got == expected
    assert steps.report().immediate == {}


class Direct(nn.Layer):
    """Uses a sublayer's weight around the sublayer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.linear(x) @ self.linear.weight


class Parent(nn.Layer):
    """Has a parameter of its own beside a sublayer's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.shift = self.create_parameter([4])

    def forward(self, x: Any) -> Any:
        return self.linear(x) + self.shift


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


class Remembers(nn.Layer):
    """Hands a tensor on where nobody sees it, beside running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Remembering()

    def forward(self, x: Any) -> Any:
        self.inner.memory = [x * 3]
        return self.inner(x)


class Remembering(nn.BatchNorm1D):
    def __init__(self) -> None:
        super().__init__(4)
        self.memory: list[Any] = []

    def forward(self, x: Any) -> Any:
        return super().forward(x) + self.memory[0]


class Box:
    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


class Boxed(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Opens()

    def forward(self, x: Any) -> Any:
        return self.inner(Box(x))


class Opens(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([4, 4])

    def forward(self, box: Any) -> Any:
        return box.tensor @ self.weight


class Boxes(Opens):
    def forward(self, x: Any) -> Any:
        return Box(x @ self.weight)


class ReturnsBox(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Boxes()

    def forward(self, x: Any) -> Any:
        return self.inner(x).tensor


class InPlace(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.inner = AddsInPlace()

    def forward(self, x: Any) -> Any:
        y = x * 2
        return self.inner(y) + y


class AddsInPlace(Shifted):
    def forward(self, x: Any) -> Any:
        return x.add_(self.shift)


class Around(nn.Layer):
    """A leaf, whose argument is used behind it."""

    def __init__(self, kind: Callable[[], Any]) -> None:
        super().__init__()
        self.inner = kind()

    def forward(self, x: Any) -> Any:
        y = x * 2
        return self.inner(y) + y


class WritesNumbers(Shifted):
    def forward(self, x: Any) -> Any:
        x.set_value(x.detach() * 0.5)
        return x + self.shift


class Decays(Shifted):
    """Writes into its parameter, in each call once."""

    def forward(self, x: Any) -> Any:
        self.shift.set_value(self.shift.detach() * 0.5)
        return x + self.shift


class Stops(Shifted):
    def forward(self, x: Any) -> Any:
        y = x + self.shift
        x.stop_gradient = True
        return y


class HooksInside(Shifted):
    def forward(self, x: Any) -> Any:
        y = x * self.shift
        y.register_hook(lambda grad: grad * 2)
        return y + self.shift


class ReturnsParameter(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Position()

    def forward(self, x: Any) -> Any:
        return x + self.inner(x)


class Position(Shifted):
    def forward(self, x: Any) -> Any:
        return self.shift


class Compiled(nn.Layer):
    """A static graph around a leaf layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = paddle.jit.to_static(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))

    def forward(self, x: Any) -> Any:
        return self.inner(x) * 2


IMMEDIATE = {
    "in a static graph": (Compiled, "0.inner.0.weight", "within paddle.jit.to_static"),
    "used around its layer": (Direct, "0.linear.weight", "outside of its layer's own forward"),
    "beside a sublayer's": (Parent, "0.shift", "sublayers with parameters of their own"),
    "borrowed parameter": (Borrows, "0.head.bias", "neither its argument nor its own"),
    "hidden tensor": (Remembers, "0.inner.weight", "neither its argument nor its own"),
    "boxed argument": (Boxed, "0.inner.weight", "called with an object of class Box"),
    "boxed result": (ReturnsBox, "0.inner.weight", "returned an object of class Box"),
    "in place": (InPlace, "0.inner.shift", "cannot run on stand-ins"),
    "numbers in place": (lambda: Around(WritesNumbers), "0.inner.shift", "into its argument"),
    "parameter in place": (lambda: Around(Decays), "0.inner.shift", "into its parameter"),
    "gradient off": (lambda: Around(Stops), "0.inner.shift", "of its argument on or off"),
    "hook inside": (lambda: Around(HooksInside), "0.inner.shift", "puts a hook"),
    "returned parameter": (ReturnsParameter, "0.inner.shift", "returns a parameter"),
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


class Either(Opens):
    def forward(self, value: Any) -> Any:
        box = isinstance(value, Box)
        output = (value.tensor if box else value) @ self.weight
        return output if box or value.shape[0] == 3 else Box(output)


def test_a_layer_that_is_handed_a_box_later_gets_its_gradient_in_i_then() -> None:
    inputs = [numbers(3, 4, seed=k) for k in range(3)]
    steps, plain = Steps(Fickle(Either(), Box)), Fickle(Either(), Box)
    plain.set_state_dict(steps.layer.state_dict())
    for k, x in enumerate(inputs):
        score(plain(x)).backward()
        steps.input_grads(k, score(steps.forward(k, x)))
        steps.weight_grads(k)
    assert grads_of(steps.layer) == grads_of(plain)
    assert "object of class Box" in steps.report().immediate["0.inner.weight"]


def test_a_layer_that_returns_a_box_later_is_refused_rather_than_wrong() -> None:
    steps = Steps(Fickle(Either(), lambda x: x[:2]))
    steps.forward(0, numbers(3, 4))
    with pytest.raises(ConfigError, match=r"'0\.inner' could wait for W, and now cannot"):
        steps.forward(1, numbers(3, 4))


class Counts(nn.Linear):
    """Draws random numbers, NumPy's and Python's too, and counts in a buffer."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("count", paddle.zeros([1]))

    def forward(self, x: Any) -> Any:
        self.count.set_value(self.count + 1)
        np.random.rand()
        random.random()
        return nn.functional.dropout(super().forward(x), 0.5)


class Averages(nn.Linear):
    """Has a running mean of what it took, and assigns the new one to the old one's name."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("mean", paddle.zeros([4]))

    def forward(self, x: Any) -> Any:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x - self.mean)


def test_a_buffer_that_a_layer_assigns_is_put_back_too() -> None:
    expected, got, _ = fused_and_split(Averages, [numbers(3, 4, seed=k) for k in range(3)])
    assert got == expected


def test_finding_out_about_a_layer_leaves_no_trace() -> None:
    expected, got, steps = fused_and_split(Counts, [numbers(3, 4, seed=k) for k in range(3)])
    assert steps.layer.count.tolist() == [3.0]
    assert got[2] == expected[2]
    x = numbers(3, 4)

    def drawn_after(call: Callable[[Any], Any]) -> list[float]:
        for seed in (paddle.seed, np.random.seed, random.seed):
            seed(3)
        assert call(x).shape == [3, 4]
        return [paddle.rand([1]).item(), np.random.rand(), random.random()]

    split = functools.partial(Steps(Counts()).forward, 0)
    assert drawn_after(split) == drawn_after(Counts())


def test_an_error_of_the_layer_itself_comes_through_and_nothing_stays_changed() -> None:
    layer = nn.Linear(4, 4)
    steps = Steps(layer)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"(?i)dim|shape|mul"):
            steps.forward(0, numbers(3, 5))
    assert "forward" not in layer.__dict__


def test_outside_of_forward_nothing_is_intercepted() -> None:
    layer = nn.Linear(4, 4)
    steps = Steps(layer)
    inside = []
    handle = layer.register_forward_pre_hook(
        lambda layer, _: inside.append("forward" in layer.__dict__)
    )
    steps.forward(0, numbers(3, 4))
    layer(numbers(3, 4))
    handle.remove()
    assert inside == [True, False]
    with steps.split.recording(0, 1), paddle.no_grad():
        assert layer(numbers(3, 4)).stop_gradient
    score(layer(numbers(3, 4))).backward()
    assert layer.weight.grad is not None


def test_a_forward_of_the_instances_own_is_kept() -> None:
    layer = nn.Linear(4, 4)
    plain = layer.forward
    layer.forward = mine = lambda x: plain(x) * 2
    x = numbers(3, 4)
    expected = layer(x).numpy().tobytes()
    assert Steps(layer).forward(0, x).numpy().tobytes() == expected
    assert layer.forward is mine


@pytest.mark.parametrize("schedule", ["1F1B", "FThenB", "Interleaved1F1B"])
def test_schedules_with_a_full_backward_are_left_alone(schedule: str) -> None:
    seen = []

    class Looks(nn.Linear):
        def forward(self, x: Any) -> Any:
            seen.append("forward" in self.__dict__)
            return super().forward(x)

    with job(2, 4, schedule):
        model = pipeline([LayerDesc(Looks, 6, 6) for _ in range(3)] + [LayerDesc(nn.Linear, 6, 4)])
        model.train_batch(batch(), sgd(model))
        assert seen
        assert not any(seen)
        assert model.deferral_report().parameters == ()
        assert str(model.deferral_report()) == f"{schedule}: no backward was split yet"


class Branch(nn.Linear):
    """Hands on what it received beside what it computes."""

    def forward(self, x: Any) -> Any:
        return super().forward(x), x


class Merge(nn.Linear):
    """Takes both."""

    def forward(self, both: Any) -> Any:
        return super().forward(both[0]) * nn.functional.tanh(both[1])


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_skip_connection_across_a_border_has_the_bits_of_a_whole_backward(ranks: int) -> None:
    layers = [
        *(LayerDesc(nn.Linear, 6, 8), nn.functional.tanh, LayerDesc(Branch, 8, 8)),
        *(lambda both: both, LayerDesc(Merge, 8, 8), nn.functional.tanh),
        *(LayerDesc(nn.Linear, 8, 8), LayerDesc(nn.Linear, 8, 4)),
    ]
    assert train(layers, ranks, "ZBH1") == train(layers, 1)


def test_evaluation_under_a_split_schedule_is_as_ever() -> None:
    with job(2, 4, "ZBH1"):
        model = pipeline()
        inputs, labels = batch()
        outputs = paddle.concat(model.eval_batch([inputs, labels]))
        model.train_batch([inputs, labels], sgd(model, rate=0.0))
        again = paddle.concat(model.eval_batch([inputs, labels]))
        assert outputs.numpy().tobytes() == again.numpy().tobytes()
        assert model._runtime.split._tapes == {}


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


def test_frozen_parameters_get_nothing_and_a_frozen_layer_is_not_touched() -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    layer[0].weight.stop_gradient = True
    for parameter in layer[1].parameters():
        parameter.stop_gradient = True
    steps = Steps(layer)
    x = numbers(3, 4)
    steps.input_grads(0, score(steps.forward(0, x)))
    steps.weight_grads(0)
    assert [p.grad is None for p in layer.parameters()] == [True, False, True, True]
    assert x.grad is not None
    assert steps.report().deferred == ("0.0.bias",)


def test_a_parameter_that_no_gradient_reaches_keeps_none() -> None:
    class Half(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            self.unused(x)
            return self.used(x)

    steps = Steps(Half())
    steps.input_grads(0, score(steps.forward(0, numbers(3, 4))))
    steps.weight_grads(0)
    assert [p.grad is None for p in steps.layer.parameters()] == [False, False, True, True]
    assert steps.report().immediate["0.unused.weight"] == "no gradient reached it"


def test_recomputed_layers_wait_as_well() -> None:
    class Recomputed(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

        def forward(self, x: Any) -> Any:
            return recompute(self.inner, x)

    expected, got, steps = fused_and_split(Recomputed, [numbers(3, 4, seed=k) for k in range(3)])
    assert got == expected
    assert len(steps.report().deferred) == 4


@pytest.mark.parametrize("rows", [4096, 65536])
def test_what_is_kept_between_i_and_w_is_counted(rows: int) -> None:
    width = 8
    steps = Steps(nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)))
    for k in range(2):
        steps.input_grads(k, score(steps.forward(k, numbers(rows, width))))
    for k in range(2):
        steps.weight_grads(k)
    one = rows * width * 4
    # Of each Linear the input and the gradient of the output.
    assert steps.report().peaks[0] == (2, 2 * 4 * one)


def test_a_large_output_is_dropped_and_the_bits_stay() -> None:
    inputs = [numbers(65536, 8, seed=k) for k in range(2)]
    expected, got, _ = fused_and_split(lambda: nn.Linear(8, 8), inputs)
    assert got == expected


def test_layers_whose_gradients_come_together_keep_nothing() -> None:
    steps = Steps(nn.LayerNorm(8))
    steps.input_grads(0, score(steps.forward(0, numbers(4096, 8))))
    steps.weight_grads(0)
    assert steps.report().peaks[0].bytes == 0


def test_everything_is_dropped_after_w() -> None:
    from fleetpipe.paddle_api.device import allocated_bytes

    with job(2, 8, "ZBH1"):
        model = pipeline(mlp_layers(hidden=64))
        data = batch(8)
        for _ in range(2):
            model.forward_backward_pipeline(data)
        before = allocated_bytes()
        for _ in range(3):
            model.forward_backward_pipeline(data)
        assert allocated_bytes() == before


def test_the_report_says_where_each_gradient_was_computed() -> None:
    layers = [
        LayerDesc(nn.Linear, 6, 4),
        LayerDesc(nn.LayerNorm, 4),
        LayerDesc(Parent),
        LayerDesc(nn.Linear, 4, 4),
    ]
    with job(2, 4, "ZBV"):
        model = pipeline(layers)
        assert "no backward was split yet" in str(model.deferral_report())
        model.train_batch(batch(), sgd(model))
        report = model.deferral_report()
    linears = ("0.weight", "0.bias", "2.linear.weight", "2.linear.bias", "3.weight", "3.bias")
    assert report.deferred == linears
    assert list(report.immediate) == ["1.weight", "1.bias", "2.shift"]
    lines = str(report).splitlines()
    assert lines[0] == "ZBV: the gradients of 6 of 9 parameters are computed in W"
    assert "  1.weight: computed in I, added in I: Paddle gives it together" in lines[1]
    assert lines[3].startswith("  2.shift: computed in I, added in I: ")
    assert [line.split()[1] for line in lines[4:]] == ["0:", "1:", "2:", "3:"]


def test_an_unfinished_batch_leaves_nothing_to_the_next() -> None:
    with job(2, 4, "ZBH1"):
        model = pipeline()
        inputs, labels = batch()
        wrong = labels.astype("float32").reshape([-1, 1, 1])
        with pytest.raises(BoundaryError):
            model.train_batch([inputs, wrong], sgd(model))
        model.layers.clear_gradients()
        loss = model.train_batch([inputs, labels], sgd(model))
        assert model._runtime.split._tapes == {}
    with job(2, 4, "1F1B"):
        other = pipeline()
        assert other.train_batch([inputs, labels], sgd(other)).numpy() == loss.numpy()
        assert bits(other.layers.state_dict()) == bits(model.layers.state_dict())
