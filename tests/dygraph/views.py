"""Lists of layers by number in which most layers take a view: strided, or from within a tensor.

Each entry takes and returns ``[ROWS, LENGTH, WIDTH]``: a view of it, a layer that takes the view,
and what makes that shape of its result again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from paddle import nn

from fleetpipe.fleet.meta_parallel import LayerDesc
from tests.dygraph.models import LENGTH, WIDTH
from tests.pipelines import CLASSES, ROWS

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
