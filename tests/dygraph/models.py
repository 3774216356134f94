"""Small models of the kinds that people train, as lists of layers, each with a batch for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import nn

from fleetpipe.fleet.meta_parallel import LayerDesc
from tests.pipelines import CLASSES, ROWS

VOCABULARY, LENGTH, WIDTH = 11, 5, 8


class Model(NamedTuple):
    """A list of layers and its data.

    Args:
        layers: Makes the list.
        batch: Makes ``[inputs, labels]`` from a number of micro-batches and a seed.
        loss: The loss function.
    """

    layers: Callable[[], list[Any]]
    batch: Callable[[int, int], list[Any]]
    loss: Callable[[Any, Any], Any]


class ScaledLoss(nn.Layer):
    """A loss with a parameter."""

    def __init__(self, first: float = 1.0) -> None:
        super().__init__()
        self.scale = self.create_parameter([1], default_initializer=nn.initializer.Constant(first))

    def forward(self, output: Any, label: Any) -> Any:
        return nn.functional.cross_entropy(output * self.scale, label)


class Attention(nn.Layer):
    """Causal self-attention of one head, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        y = self.norm(x)
        scores = self.query(y) @ self.key(y).transpose([0, 2, 1]) / WIDTH**0.5
        mask = paddle.triu(paddle.full([LENGTH, LENGTH], -1e9), 1)
        return x + self.out(nn.functional.softmax(scores + mask) @ self.value(y))


class FeedForward(nn.Layer):
    """Two products with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Embedding(nn.Layer):
    """Tokens and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, ids: Any) -> Any:
        return self.tokens(ids) + self.places(paddle.arange(LENGTH))


def _token_batch(labels_for_each_token: bool) -> Callable[[int, int], list[Any]]:
    def make(micro_batches: int, seed: int) -> list[Any]:
        numbers = np.random.default_rng(seed)
        rows = micro_batches * ROWS
        ids = numbers.integers(0, VOCABULARY, (rows, LENGTH + 1))
        labels = ids[:, 1:] if labels_for_each_token else numbers.integers(0, CLASSES, (rows, 1))
        return [paddle.to_tensor(ids[:, :-1]), paddle.to_tensor(labels)]

    return make


def _image_batch(micro_batches: int, seed: int) -> list[Any]:
    numbers = np.random.default_rng(seed)
    rows = micro_batches * ROWS
    images = numbers.standard_normal((rows, 1, 12, 12)).astype("float32")
    return [paddle.to_tensor(images), paddle.to_tensor(numbers.integers(0, CLASSES, (rows, 1)))]


def _mlp() -> list[Any]:
    layers: list[Any] = [LayerDesc(nn.Embedding, VOCABULARY, WIDTH), lambda x: x.flatten(1)]
    width = LENGTH * WIDTH
    for _ in range(4):
        layers += [
            LayerDesc(nn.Linear, width, WIDTH),
            LayerDesc(nn.LayerNorm, WIDTH),
            nn.functional.relu,
        ]
        width = WIDTH
    return [*layers, LayerDesc(nn.Linear, width, CLASSES)]


def _conv_net() -> list[Any]:
    return [
        LayerDesc(nn.Conv2D, 1, 4, 3, padding=1),
        LayerDesc(nn.ReLU),
        LayerDesc(nn.MaxPool2D, 2),
        LayerDesc(nn.Conv2D, 4, 6, 3, padding=1),
        LayerDesc(nn.BatchNorm2D, 6),
        LayerDesc(nn.ReLU),
        LayerDesc(nn.Conv2D, 6, 6, 3, padding=1),
        LayerDesc(nn.ReLU),
        LayerDesc(nn.MaxPool2D, 2),
        LayerDesc(nn.Flatten),
        LayerDesc(nn.Linear, 54, 16),
        LayerDesc(nn.ReLU),
        LayerDesc(nn.Linear, 16, CLASSES),
    ]


def _gpt() -> list[Any]:
    blocks = [LayerDesc(kind) for _ in range(4) for kind in (Attention, FeedForward)]
    return [
        LayerDesc(Embedding),
        *blocks,
        LayerDesc(nn.LayerNorm, WIDTH),
        LayerDesc(nn.Linear, WIDTH, VOCABULARY),
    ]


def _token_loss(output: Any, labels: Any) -> Any:
    return nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten())


MODELS = {
    "mlp": Model(_mlp, _token_batch(False), nn.CrossEntropyLoss()),
    "convolutions": Model(_conv_net, _image_batch, nn.CrossEntropyLoss()),
    "gpt": Model(_gpt, _token_batch(True), _token_loss),
}
