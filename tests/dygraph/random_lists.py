"""Lists of layers by number, for training beside the same list in a plain loop.

Each kind of entry takes and returns ``[rows, LENGTH, WIDTH]``, and none is among the graphs whose
sums have another order (docs/parity.md), so that every bit is to agree.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import paddle
from paddle import nn

from fleetpipe.fleet.meta_parallel import LayerDesc
from tests.dygraph.backward.leaves import Called
from tests.dygraph.models import LENGTH, WIDTH, Attention, FeedForward
from tests.pipelines import CLASSES

#: Rows of the embedding.
_ROWS = 6


def _called(call: Callable[..., Any], *kinds: Callable[[], Any]) -> Called:
    return Called(call, *(kind() for kind in kinds))


def _linear(**options: Any) -> Callable[[], Any]:
    return lambda: nn.Linear(WIDTH, WIDTH, **options)


def _frozen(name: str) -> Callable[[], Any]:
    def make() -> Any:
        layer = nn.Linear(WIDTH, WIDTH)
        getattr(layer, name).stop_gradient = True
        return layer

    return make


def _hooked() -> Any:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.weight.register_hook(lambda grad: grad * 0.5)
    layer.bias.register_hook(lambda grad: None)
    return layer


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


def _without_gradient(x: Any, layer: Any) -> Any:
    with paddle.no_grad():
        gate = nn.functional.sigmoid(layer(x))
    return x * gate + layer(x)


def _convolved(x: Any, convolution: Any) -> Any:
    return x + nn.functional.relu(convolution(x.transpose([0, 2, 1]))).transpose([0, 2, 1])


def _either(x: Any, one: Any, other: Any) -> Any:
    return one(x) if float(x.mean()) > 0 else other(x)


_KINDS: dict[str, Callable[[], Any]] = {
    "linear": _linear(),
    "without bias": _linear(bias_attr=False),
    "attention": Attention,
    "feed forward": FeedForward,
    "own product": OwnProduct,
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "batch norm": lambda: nn.BatchNorm1D(WIDTH, data_format="NLC"),
    "twice": lambda: _called(lambda x, fc: fc(paddle.tanh(fc(x))), _linear()),
    "frozen weight": lambda: _called(lambda x, fc: x + paddle.tanh(fc(x)), _frozen("weight")),
    "frozen bias": lambda: _called(lambda x, fc: x + paddle.tanh(fc(x)), _frozen("bias")),
    "hooks": lambda: _called(lambda x, fc: x + fc(x), _hooked),
    "embedding": lambda: _called(_by_values, lambda: nn.Embedding(_ROWS, WIDTH)),
    "convolution": lambda: _called(_convolved, lambda: nn.Conv1D(WIDTH, WIDTH, 3, padding=1)),
    "detached": lambda: _called(lambda x, a, b: x + a(b(x).detach()), _linear(), _linear()),
    "without gradient": lambda: _called(_without_gradient, _linear()),
    "norm without gradient": lambda: _called(_without_gradient, lambda: nn.LayerNorm(WIDTH)),
    "either": lambda: _called(_either, _linear(), _linear()),
    "unused": lambda: _called(lambda x, fc, _: fc(x), _linear(), _linear()),
    "in place": lambda: _called(lambda x, fc: nn.functional.relu_(fc(x)) * 2, _linear()),
    "weight norm": lambda: nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "as it is": lambda: _called(lambda x: x),
}

#: Entries that hand a pair or a dict on, perhaps over a border.
_RUNS: tuple[tuple[Callable[[], Any], ...], ...] = (
    (
        lambda: _called(lambda x, fc: (fc(x), paddle.tanh(x)), _linear()),
        lambda: _called(lambda pair, fc: (nn.functional.relu(fc(pair[0])), pair[1]), _linear()),
        lambda: _called(lambda pair, fc: fc(pair[0]) * pair[1], _linear()),
    ),
    (
        lambda: _called(lambda x, fc: {"x": fc(x), "mask": x.detach() > 0, "by": 3}, _linear()),
        lambda: _called(
            lambda v, fc: fc(v["x"]) * v["mask"].astype("float32") * v["by"], _linear()
        ),
    ),
)


def random_list(number: int) -> list[Any]:
    """Returns the descriptions of the layers; the last gives logits [rows, CLASSES]."""
    draw = random.Random(number)
    entries: list[Callable[[], Any]] = []
    while len(entries) < 10:
        if draw.random() < 0.2:
            entries += draw.choice(_RUNS)
        else:
            entries.append(_KINDS[draw.choice(list(_KINDS))])
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
