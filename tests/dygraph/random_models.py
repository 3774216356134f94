"""Models by number, of all that a Linear may meet: shapes, sharing, hooks, gradients of gradients.

Each kind of block takes and returns ``[rows, length, width]``. Beside ``random_lists`` they vary
in sizes, dtypes and numbers, and some are among the graphs whose sums may have another order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import nn
from paddle.nn.functional import linear

from fleetpipe.fleet.meta_parallel import LayerDesc

TOKENS, OUTPUTS, MICRO_BATCHES = 17, 4, 3
tanh = paddle.tanh


def _linear(outputs: int = 1, inputs: int = 1, **options: Any) -> Any:
    """Makes a Linear whose inputs and outputs are so many times the width."""

    def make(width: int) -> Any:
        random_weights = paddle.ParamAttr(initializer=nn.initializer.Normal(0, 0.3))
        attributes = {"weight_attr": random_weights, "bias_attr": random_weights, **options}
        return nn.Linear(inputs * width, outputs * width, **attributes)

    return make


def _changed(change: Callable[[Any], object]) -> Callable[[int], Any]:
    def make(width: int) -> Any:
        layer = _linear()(width)
        change(layer)
        return layer

    return make


def _freeze(*names: str) -> Callable[[int], Any]:
    return _changed(
        lambda fc: [setattr(getattr(fc, name), "stop_gradient", True) for name in names]
    )


def _other_bias(*shape: int) -> Callable[[int], Any]:
    def change(layer: Any) -> None:
        sizes = [size or layer.weight.shape[1] for size in shape]
        layer.bias = layer.create_parameter(
            sizes, default_initializer=nn.initializer.Normal(0, 0.5)
        )

    return _changed(change)


def _hook_parameters(layer: Any) -> None:
    for parameter in layer.parameters():
        parameter.register_hook(lambda grad: grad * 1.5)


def _hook_calls(layer: Any) -> None:
    layer.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 1.25,))
    layer.register_forward_post_hook(lambda _, inputs, output: output * 0.75)


def _hooked(tensor: Any, hook: Callable[[Any], Any]) -> Any:
    if not tensor.stop_gradient:
        tensor.register_hook(hook)
    return tensor


def _some_rows(x: Any, a: Any) -> Any:
    half = max(1, x.shape[1] // 2)
    return x + a(x[:, :half]).mean(1, keepdim=True) + a(x[:, :1]) * 0.3 + a(x[:1]).sum() * 0.01


def _no_rows(x: Any, a: Any, b: Any) -> Any:
    # Plain Paddle fails where what has no rows needs no gradient.
    y = tanh(b(x))
    return y + a(y[:0]).sum() + b(y[:0]).sum()


def _in_place(x: Any, a: Any, b: Any) -> Any:
    y = b(nn.functional.relu_(a(x)))
    y.scale_(0.5)
    return y


def _shared_bias(x: Any, a: Any, b: Any) -> Any:
    return tanh(linear(tanh(a(x)), b.weight, a.bias)) + b(x)


def _penalized(by_weight: bool) -> Callable[..., Any]:
    """A gradient within the forward, by what the first layer takes or by its weight."""

    def call(x: Any, a: Any, b: Any) -> Any:
        if not paddle.is_grad_enabled():
            return a(x)
        z = tanh(b(x))
        y = tanh(a(z))
        by = a.weight if by_weight else z
        (slope,) = paddle.grad(y.sum(), [by], create_graph=True)
        return y + (slope.mean() if by_weight else slope)

    return call


def _recomputed(x: Any, a: Any, b: Any) -> Any:
    return paddle.distributed.fleet.utils.recompute(lambda v: tanh(b(tanh(a(v)))), x)


def _without_gradient(x: Any, a: Any, b: Any) -> Any:
    with paddle.no_grad():
        y = a(x)
    return tanh(a(b(x)) + y)


def _chain(x: Any, *layers: Any) -> Any:
    for layer in layers:
        x = tanh(layer(x))
    return x


_L = _linear()
_ENCODER = lambda width: nn.TransformerEncoderLayer(width, 1, 2 * width, 0.0, "gelu")  # noqa: E731

#: What a block computes, and what makes its layers, of a width.
KINDS: dict[str, tuple[Callable[..., Any], Sequence[Callable[[int], Any]]]] = {
    "linear": (lambda x, a, b: tanh(b(a(x))), [_L, _L]),
    "no bias": (lambda x, a, b: b(tanh(a(x))), [_linear(bias_attr=False), _L]),
    "twice": (lambda x, a: _chain(x, a, a, a), [_L]),
    "side by side": (lambda x, a, b: tanh(b(a(x) + a(x * 1.5) + a(x * 2.5))), [_L, _L]),
    "some rows": (_some_rows, [_L]),
    "shared layer": (lambda x, a: tanh(a(tanh(a(x)))) + a(x), [_L]),
    "frozen weight": (_chain, [_freeze("weight"), _L]),
    "frozen bias": (_chain, [_freeze("bias"), _L]),
    "frozen": (_chain, [_freeze("weight", "bias"), _L]),
    "parameter hooks": (_chain, [_changed(_hook_parameters), _L]),
    "layer hooks": (_chain, [_changed(_hook_calls), _L]),
    "output hook": (lambda x, a, b: b(tanh(_hooked(a(x), lambda g: g * 0.5))), [_L, _L]),
    "input hook": (lambda x, a, b: a(_hooked(tanh(b(x)), lambda g: g + 1e-3)), [_L, _L]),
    "layer norm": (lambda x, a, n, b: b(n(a(x))) + x, [_L, nn.LayerNorm, _L]),
    "relu": (lambda x, a, b: b(nn.functional.relu(a(x))), [_linear(outputs=2), _linear(inputs=2)]),
    "gelu": (lambda x, a, b: b(nn.functional.gelu(a(x))), [_linear(outputs=3), _linear(inputs=3)]),
    "encoder": (lambda x, a: a(x), [_ENCODER]),
    "residual": (lambda x, a, b: x + tanh(b(tanh(a(x)) + x)), [_L, _L]),
    "in place": (_in_place, [_L, _L]),
    "gradient": (_penalized(by_weight=False), [_L, _L]),
    "gradient of a weight": (_penalized(by_weight=True), [_L, _L]),
    "recomputed": (_recomputed, [_L, _L]),
    "strided": (lambda x, a: tanh(a(paddle.concat([x, x], axis=-1)[:, :, ::2])), [_L]),
    "vector": (lambda x, a, b: tanh(b(x) + a(x[0, 0])), [_L, _L]),
    "no rows": (_no_rows, [_L, _L]),
    "bias of one": (lambda x, a: tanh(a(x)) + x, [_other_bias(1)]),
    "bias of a row": (lambda x, a: tanh(a(x)) + x, [_other_bias(1, 0)]),
    "without gradient": (_without_gradient, [_L, _L]),
    "detached": (lambda x, a, b: tanh(a(x.detach()) + b(x)), [_L, _L]),
    "bias around": (lambda x, a: tanh(a(x) + a.bias), [_L]),
    "bias all around": (lambda x, a: tanh(a(x + a.bias) * a.bias) + tanh(a.bias), [_L]),
    "weight around": (lambda x, a: tanh(linear(tanh(a(x)), a.weight.t())), [_L]),
    "product around": (lambda x, a: tanh(a(x)) + linear(x, a.weight, a.bias), [_L]),
    "shared bias": (_shared_bias, [_L, _L]),
    "weight of others": (lambda x, a, b: tanh(linear(a(x), a.weight * 2.0, b.bias)), [_L, _L]),
}

if paddle.__version__ < "3":
    # It refuses a product without rows.
    del KINDS["no rows"]

#: Those whose parameters are used around their layer: sums in another order (docs/parity.md), where
#: backward is split; of the second, wherever leaves are fast.
AROUND = frozenset(kind for kind in KINDS if "around" in kind or "of other" in kind) | {
    *("shared bias", "gradient of a weight")
}
BIAS_THREE_TIMES = frozenset({"bias all around", "some rows"})

#: Those that cannot run where backward is split.
REFUSED = frozenset({"gradient", "gradient of a weight"})


class Block(nn.Layer):  # type: ignore[misc]
    """A block of some kind."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        call, makers = KINDS[kind]
        self.call, self.parts = call, nn.LayerList([make(width) for make in makers])

    def forward(self, x: Any) -> Any:
        return self.call(x, *self.parts)


class Tokens(nn.Layer):  # type: ignore[misc]
    """An embedding, and a product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table, self.product = nn.Embedding(TOKENS, width), nn.Linear(width, width)

    def forward(self, ids: Any) -> Any:
        return self.product(self.table(ids))


class Case(NamedTuple):
    """A model by number, and how it is trained.

    Attributes:
        number: The number.
        width: Numbers of a row.
        length: Places of a row of the batch.
        rows: Rows of a micro-batch.
        dtype: Of inputs and parameters.
        special: What stands among the inputs; None for usual numbers alone.
        tokens: Whether it begins with an embedding.
        interval: Entries that are recomputed together; 0 for none.
        kinds: Those of its blocks.
        is_real: Whether its sizes are such as gain time.
    """

    number: int
    width: int
    length: int
    rows: int
    dtype: str
    special: float | None
    tokens: bool
    interval: int
    kinds: tuple[str, ...]
    is_real: bool

    @classmethod
    def of(cls, number: int) -> Case:
        """Draws a case; the first have each kind once at least."""
        draw = random.Random(number)
        is_real = draw.random() < 0.3
        widths = [255, 256, 260] if is_real else [1, 2, 3, 5, 8, 16, 24, 31, 64, 65]
        lengths = [63, 64, 127, 128] if is_real else [1, 2, 3, 7, 16, 33, 64]
        names = list(KINDS)
        kinds = [names[number % len(names)]] + [draw.choice(names) for _ in range(3)]
        draw.shuffle(kinds)
        dtype = draw.choice(["float32", "float32", "float32", "float64"])
        tiny = float(np.finfo(dtype).tiny) / 8
        return cls(
            *(number, draw.choice(widths), draw.choice(lengths)),
            *(draw.choice([1, 2] if is_real else [1, 1, 2, 3, 5]), dtype),
            draw.choice([None] * 6 + [np.nan, np.inf, tiny, 1e30]),
            *(draw.random() < 0.3, draw.choice([0, 0, 0, 1, 2]), tuple(kinds), is_real),
        )

    def entries(self) -> list[Any]:
        """Returns the descriptions of the layers; the last gives ``[rows, length, OUTPUTS]``."""
        first = [LayerDesc(Tokens, self.width)] if self.tokens else []
        blocks = [LayerDesc(Block, kind, self.width) for kind in self.kinds]
        return [*first, *blocks, LayerDesc(nn.Linear, self.width, OUTPUTS)]

    def batch(self, step: int) -> list[Any]:
        """Returns ``[inputs, labels]`` of all micro-batches."""
        numbers = np.random.default_rng([self.number, step])
        shape = (self.rows * MICRO_BATCHES, self.length)
        labels = numbers.standard_normal((*shape, OUTPUTS)).astype(self.dtype)
        if self.tokens:
            return [paddle.to_tensor(numbers.integers(0, TOKENS, shape)), paddle.to_tensor(labels)]
        inputs = numbers.standard_normal((*shape, self.width))
        if self.special is not None:
            inputs = np.where(numbers.random(inputs.shape) < 0.05, self.special, inputs)
        return [paddle.to_tensor(inputs.astype(self.dtype)), paddle.to_tensor(labels)]
