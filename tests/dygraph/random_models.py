"""Models and lists of layers by number, for training beside the same in plain Paddle."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import nn
from paddle.nn.functional import linear

from fleetpipe.fleet.meta_parallel import LayerDesc
from tests.dygraph.models import LENGTH, WIDTH, Called
from tests.pipelines import CLASSES, ROWS

#: Rows of the embedding.
_ROWS = 6


def _called(call: Callable[..., Any], *kinds: Callable[[], Any]) -> Called:
    return Called(call, *(kind() for kind in kinds))


def _entry() -> Any:
    return nn.Linear(WIDTH, WIDTH)


class OwnProduct(nn.Layer):  # type: ignore[misc]
    """A product and a sum of its own, and a running mean that it assigns anew."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = self.create_parameter([WIDTH, WIDTH])
        self.shift = self.create_parameter([WIDTH], is_bias=True)
        self.register_buffer("mean", paddle.zeros([WIDTH]))

    def forward(self, x: Any) -> Any:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean([0, 1])
        return paddle.tanh((x - self.mean) @ self.matrix + self.shift)


def _by_values(x: Any, embedding: Any) -> Any:
    ids = (x.detach().abs().mean(-1) * 7).astype("int64") % _ROWS
    return x + embedding(ids)


def _entry_without_gradient(x: Any, layer: Any) -> Any:
    with paddle.no_grad():
        gate = nn.functional.sigmoid(layer(x))
    return x * gate + layer(x)


def _convolved(x: Any, convolution: Any) -> Any:
    return x + nn.functional.relu(convolution(x.transpose([0, 2, 1]))).transpose([0, 2, 1])


def _either(x: Any, one: Any, other: Any) -> Any:
    return one(x) if float(x.mean()) > 0 else other(x)


#: Beside those of KINDS.
_KINDS: dict[str, Callable[[], Any]] = {
    "own product": OwnProduct,
    "batch norm": lambda: nn.BatchNorm1D(WIDTH, data_format="NLC"),
    "embedding": lambda: _called(_by_values, lambda: nn.Embedding(_ROWS, WIDTH)),
    "convolution": lambda: _called(_convolved, lambda: nn.Conv1D(WIDTH, WIDTH, 3, padding=1)),
    "norm without gradient": lambda: _called(_entry_without_gradient, lambda: nn.LayerNorm(WIDTH)),
    "either": lambda: _called(_either, _entry, _entry),
    "unused": lambda: _called(lambda x, fc, _: fc(x), _entry, _entry),
    "weight norm": lambda: nn.utils.weight_norm(_entry()),
    "as it is": lambda: _called(lambda x: x),
}

#: Entries that hand a pair or a dict on, perhaps over a border.
_RUNS: tuple[tuple[Callable[[], Any], ...], ...] = (
    (
        lambda: _called(lambda x, fc: (fc(x), paddle.tanh(x)), _entry),
        lambda: _called(lambda pair, fc: (nn.functional.relu(fc(pair[0])), pair[1]), _entry),
        lambda: _called(lambda pair, fc: fc(pair[0]) * pair[1], _entry),
    ),
    (
        lambda: _called(lambda x, fc: {"x": fc(x), "mask": x.detach() > 0, "by": 3}, _entry),
        lambda: _called(lambda v, fc: fc(v["x"]) * v["mask"].astype("float32") * v["by"], _entry),
    ),
)


def random_list(number: int) -> list[Any]:
    """Returns the descriptions of the layers; the last gives logits [rows, CLASSES]."""
    draw = random.Random(number)
    blocks = [partial(Block, kind, WIDTH) for kind in KINDS if kind not in OTHER_SUMS]
    entries: list[Callable[[], Any]] = []
    while len(entries) < 10:
        if draw.random() < 0.2:
            entries += draw.choice(_RUNS)
        else:
            entries.append(draw.choice([*_KINDS.values(), *blocks]))
    entries.append(lambda: _called(lambda x, fc: fc(x.mean(1)), lambda: nn.Linear(WIDTH, CLASSES)))
    return [LayerDesc(_Made, entry) for entry in entries]


class _Made(nn.Layer):  # type: ignore[misc]
    """The layer that a function makes."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.made = make()

    def forward(self, value: Any) -> Any:
        return self.made(value)


def random_batch(number: int, rows: int) -> list[Any]:
    """Returns ``[inputs, labels]``."""
    paddle.seed(number)
    return [paddle.randn([rows, LENGTH, WIDTH]), paddle.randint(0, CLASSES, [rows, 1])]


#: Views of ``[rows, LENGTH, WIDTH]``; the last axis stays one of WIDTH.
VIEWS: dict[str, Callable[[Any], Any]] = {
    "first": lambda x: x[:, 0],
    "last": lambda x: x[:, -1],
    "slice": lambda x: x[:, 1:3],
    "rows": lambda x: x[1:],
    "steps": lambda x: x[:, ::2],
    "backwards": lambda x: x[:, ::-1],
    "transposed": lambda x: x.transpose([1, 0, 2]),
    "turned": lambda x: paddle.concat([x, x], 1)[:, :WIDTH].transpose([0, 2, 1]),
    "expanded": lambda x: x[:, :1].expand([-1, 3, -1]),
    "as strided": lambda x: paddle.as_strided(x * 1.0, [2, 3, WIDTH], [WIDTH, 0, 1], 4 * WIDTH),
    "unbound": lambda x: x.unbind(1)[1],
    "split": lambda x: x.split([1, LENGTH - 1], 1)[1],
    "reshaped": lambda x: x[:, 1:].reshape([-1, WIDTH]),
    "of a view": lambda x: x[1:].transpose([1, 0, 2])[1:, -1],
    "itself": lambda x: x,
}


class Takes(nn.Layer):  # type: ignore[misc]
    """Calls ``call(view, *layers)``."""

    def __init__(self, call: Callable[..., Any], *kinds: Callable[[], Any]) -> None:
        super().__init__()
        self.call, self.inner = call, nn.LayerList([kind() for kind in kinds])
        self.register_buffer("table", paddle.randn([WIDTH, WIDTH]).transpose([1, 0])[1:])

    def forward(self, x: Any) -> Any:
        return self.call(x if x.ndim == 3 else x.unsqueeze(1), self, *self.inner)


def _embedded(x: Any, _: Takes, table: Any) -> Any:
    numbers = (x.detach() * 4).astype("int64").abs() % 5
    return x + table(numbers.transpose([2, 0, 1])[0])


#: What is called with a view, by the kinds of layers that it needs.
LAYERS: dict[str, tuple[Any, ...]] = {
    "Linear": (lambda x, _, layer: layer(x), lambda: nn.Linear(WIDTH, WIDTH)),
    "two": (lambda x, _, a, b: a(x) * b(x[:1]), *[lambda: nn.Linear(WIDTH, WIDTH)] * 2),
    "LayerNorm": (lambda x, _, layer: layer(x), lambda: nn.LayerNorm(WIDTH)),
    "GRU": (lambda x, _, layer: layer(x)[0], lambda: nn.GRU(WIDTH, WIDTH)),
    "LSTM": (lambda x, _, layer: layer(x)[0], lambda: nn.LSTM(WIDTH, WIDTH)),
    "cell": (lambda x, _, layer: layer(x[:, 0])[0], lambda: nn.GRUCell(WIDTH, WIDTH)),
    "Conv1D": (
        lambda x, _, layer: layer(x.transpose([0, 2, 1])).transpose([0, 2, 1]),
        lambda: nn.Conv1D(WIDTH, WIDTH, 1),
    ),
    "Conv2D": (lambda x, _, layer: layer(x.unsqueeze(1))[:, 0], lambda: nn.Conv2D(1, 2, 3, 1, 1)),
    "BatchNorm": (
        lambda x, _, layer: layer(x.transpose([0, 2, 1])).transpose([0, 2, 1]),
        lambda: nn.BatchNorm1D(WIDTH),
    ),
    "PReLU": (lambda x, _, layer: layer(x) * x, nn.PReLU),
    "Embedding": (_embedded, lambda: nn.Embedding(5, 1)),
    "attention": (
        lambda x, _, layer: layer(x, x[:, :1], x[:, :1]),
        lambda: nn.MultiHeadAttention(WIDTH, 2),
    ),
    "buffer": (
        lambda x, own, layer: layer(x) @ own.table.transpose([1, 0]) @ own.table,
        lambda: nn.Linear(WIDTH, WIDTH),
    ),
}


def restored(rows: int) -> Callable[[Any], Any]:
    """Returns a function from what a layer makes of a view to ``[rows, LENGTH, WIDTH]``."""

    def restore(x: Any) -> Any:
        lines = x.reshape([-1, WIDTH])
        line = (lines * paddle.arange(1.0, len(lines) + 1).unsqueeze(1).cos()).mean(0)
        return paddle.arange(1.0, rows * LENGTH + 1).reshape([rows, LENGTH, 1]).sin() * line

    return restore


def viewing_list(number: int) -> list[Any]:
    """Returns the list of a number, for micro-batches of ROWS rows."""
    draw = random.Random(number)
    entries: list[Any] = [LayerDesc(nn.Linear, WIDTH, WIDTH)]
    for _ in range(3):
        view, takes = VIEWS[draw.choice([*VIEWS])], LAYERS[draw.choice([*LAYERS])]
        entries += [view, LayerDesc(Takes, *takes), restored(ROWS)]
    return [*entries, lambda x: x[:, 1:].mean(1), LayerDesc(nn.Linear, WIDTH, CLASSES)]


def viewing_batch(number: int, micro_batches: int) -> list[Any]:
    """Returns inputs and labels of a batch."""
    numbers, rows = np.random.default_rng(number), micro_batches * ROWS
    return [
        paddle.to_tensor(numbers.standard_normal((rows, LENGTH, WIDTH)).astype("float32")),
        paddle.to_tensor(numbers.integers(0, CLASSES, (rows, 1))),
    ]


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


OTHER_SUMS = AROUND | BIAS_THREE_TIMES | REFUSED


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
