"""Plain models by number: random programs of layers and glue, for comparison with themselves."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import paddle
from paddle import nn

WIDTH, ROWS = 4, 2

#: Makes a tensor [rows, WIDTH] of some that are known.
Step = Callable[[Any, "list[Any]"], Any]


class Halves(nn.Layer):  # type: ignore[misc]
    """Returns a tuple, or a dict with None in it."""

    def __init__(self, named: bool) -> None:
        super().__init__()
        self.inner, self.named = nn.Linear(WIDTH, 2 * WIDTH), named

    def forward(self, x: Any, more: Any = None, scale: float = 1.0) -> Any:
        left, right = self.inner(x).chunk(2, -1)
        left = left * scale if more is None else left + more
        return {"left": left, "none": None, "right": (right,)} if self.named else (left, right)


class Block(nn.Layer):  # type: ignore[misc]
    """Sublayers within a sublayer, around a skip."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 6), nn.GELU(), nn.Linear(6, WIDTH))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Any) -> Any:
        return x + self.drop(self.body(x))


class RandomModel(nn.Layer):  # type: ignore[misc]
    """A program of random steps: each takes of what the earlier ones made."""

    def __init__(self, number: int, steps: int = 12) -> None:
        super().__init__()
        self.draw = random.Random(number)
        self.layers = nn.LayerList()
        self.register_buffer("table", paddle.arange(1.0, WIDTH + 1) / WIDTH)
        self.register_buffer("hidden", paddle.ones([WIDTH]) * 0.5, persistable=False)
        self.bias = self.create_parameter([WIDTH])
        self.random = self.draw.random() < 0.4
        self.program = [self._step() for _ in range(steps)]
        self.output = self.draw.randrange(5)

    def forward(self, x: Any) -> Any:
        made = [x]
        for step in self.program:
            made.append(step(self, made))
        last = self.layers[0](made[-1]) + made[len(made) // 2].mean()
        if self.output == 0:
            return last
        if self.output == 1:
            return last, made[3]
        if self.output == 2:
            return {"last": last, "nothing": None, "several": [made[2], (made[4], 3)]}
        return last * made[1].sum() if self.output == 3 else (last, None, x)

    def _layer(self, make: Callable[[], Any]) -> int:
        """Returns the number of a layer: a new one, or one of the same class that is there."""
        new = make()
        same = [i for i, layer in enumerate(self.layers) if type(layer) is type(new)]
        if same and self.draw.random() < 0.3 and not isinstance(new, nn.BatchNorm1D):
            return self.draw.choice(same)
        if len(same) > 1 and isinstance(new, nn.Linear) and self.draw.random() < 0.2:
            new.weight = self.layers[same[0]].weight
        self.layers.append(new)
        return len(self.layers) - 1

    def _step(self) -> Step:
        if not len(self.layers):
            return self._linear()
        kinds = [self._linear, self._linear, self._block, self._norm, self._halves, self._glue]
        kinds += [self._glue, self._glue, self._written, self._owned]
        return self.draw.choice(kinds)()

    def _taken(self, back: int = 6) -> Callable[[list[Any]], Any]:
        place = self.draw.randrange(1, back)
        return lambda made: made[max(len(made) - place, 0)]

    def _linear(self) -> Step:
        layer, taken = self._layer(lambda: nn.Linear(WIDTH, WIDTH)), self._taken(3)
        return lambda self, made: self.layers[layer](taken(made))

    def _block(self) -> Step:
        dropout = 0.5 if self.random else 0.0
        layer, taken = self._layer(lambda: Block(dropout)), self._taken(3)
        return lambda self, made: self.layers[layer](taken(made))

    def _norm(self) -> Step:
        kind = self.draw.choice([nn.LayerNorm, nn.BatchNorm1D])
        layer, taken = self._layer(lambda: kind(WIDTH)), self._taken(3)
        return lambda self, made: self.layers[layer](taken(made))

    def _halves(self) -> Step:
        named = self.draw.random() < 0.5
        layer, one, other = self._layer(lambda: Halves(named)), self._taken(), self._taken()
        given, scale = self.draw.random() < 0.5, self.draw.choice([1, 0.5, 2])

        def step(self: Any, made: list[Any]) -> Any:
            found = self.layers[layer](one(made), other(made) if given else None, scale=scale)
            if isinstance(found, dict):
                return found["left"] * found["right"][0]
            return found[0] - found[1]

        return step

    def _owned(self) -> Step:
        taken, kind = self._taken(), self.draw.randrange(4)

        def step(self: Any, made: list[Any]) -> Any:
            x = taken(made)
            if kind == 0:
                return x * self.table + self.hidden
            if kind == 1:
                return x + self.bias
            if kind == 2:
                return paddle.matmul(x, self.layers[0].weight, transpose_y=True)
            return nn.functional.linear(x, self.layers[0].weight, self.bias)

        return step

    def _written(self) -> Step:
        one, other, kind = self._taken(), self._taken(), self.draw.randrange(5)

        def step(self: Any, made: list[Any]) -> Any:
            x = one(made) * 1.5
            if kind == 0:
                x.add_(other(made))
            elif kind == 1:
                x[:, 1:3] = other(made)[:, 1:3]
            elif kind == 2:
                x.scale_(0.5)
            elif kind == 3:
                x[0] = 0.25
            else:
                y = x.detach()
                x = x + y.clip_(-1.0, 1.0)
            return x

        return step

    def _glue(self) -> Step:
        one, other, kind = self._taken(8), self._taken(3), self.draw.randrange(14)
        kind = 12 if kind == 13 and not self.random else kind

        def step(self: Any, made: list[Any]) -> Any:
            x, y = one(made), other(made)
            if kind == 0:
                return x + y
            if kind == 1:
                return x * y.tanh()
            if kind == 2:
                return paddle.concat([x[:, :2], y[:, 2:]], -1)
            if kind == 3:
                return paddle.where(x > 0, x, y * 0.5)
            if kind == 4:
                return x / x.shape[0] + len(y)
            if kind == 5:
                with paddle.no_grad():
                    scale = y.abs().mean() + 1
                return x * scale
            if kind == 6:
                return x * y.detach() - 0.5
            if kind == 7:
                return sum(paddle.split(x, 2, -1), y[:, :2]).tile([1, 2])
            if kind == 8:
                picked = nn.functional.one_hot(y.argmax(-1), WIDTH)
                return x + picked.cast(x.dtype)
            if kind == 9:
                return paddle.stack([x, y], 1).max(1)
            if kind == 10:
                return paddle.einsum("ij,kj->ik", x, y).matmul(x) * 0.1
            if kind == 11:
                return x.flip(1)[..., None].squeeze(-1) + paddle.zeros_like(y)
            if kind == 12:
                return x.transpose([1, 0]).reshape([-1]).reshape([WIDTH, -1]).t()
            return nn.functional.dropout(x, 0.3, self.training)

        return step
