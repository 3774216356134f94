"""A small causal model whose layers take slices, and batches for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from fleetpipe.contrib import slices
from fleetpipe.fleet.meta_parallel import LayerDesc
from tests.dygraph.models import Model

WIDTH = 8
VOCABULARY = 16


class Attention(nn.Layer):
    """Causal attention with one head, added to what came in."""

    takes_slices = True

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Any) -> Any:
        query, key, value = self.mixed(self.norm(hidden)).split(3, axis=-1)
        kept = slices.earlier(self)
        slices.keep(self, {"key": key, "value": value})
        if kept:
            key = paddle.concat([*(one["key"] for one in kept), key], axis=1)
            value = paddle.concat([*(one["value"] for one in kept), value], axis=1)
        places, seen = query.shape[1], key.shape[1]
        hidden_places = paddle.triu(paddle.full([places, seen], -1e9), 1 + seen - places)
        scores = paddle.matmul(query, key, transpose_y=True) + hidden_places
        return hidden + self.dropout(paddle.matmul(F.softmax(scores), value))


class Total(nn.Layer):
    """Adds the mean of all places so far: a plain value and a tensor go from slice to slice."""

    takes_slices = True

    def forward(self, hidden: Any) -> Any:
        before = slices.earlier(self)
        count, total = before[-1] if before else (0, paddle.zeros_like(hidden[:, 0]))
        totals = total.unsqueeze(1) + hidden.cumsum(axis=1)
        places = paddle.arange(count + 1, count + hidden.shape[1] + 1, dtype="float32")
        slices.keep(self, (count + hidden.shape[1], totals[:, -1]))
        return hidden + totals / places.reshape([1, -1, 1])


def loss(logits: Any, labels: Any) -> Any:
    """The mean cross-entropy of [rows, length] labels."""
    return F.cross_entropy(logits, labels.unsqueeze(-1))


loss.counted = lambda labels: labels.size  # type: ignore[attr-defined]


def layers(dropout: float = 0.0) -> list[Any]:
    """The list of layers: 2 + 4."""
    middle = [LayerDesc(Attention, dropout), LayerDesc(Total)] * 2
    first, last = (
        LayerDesc(nn.Embedding, VOCABULARY, WIDTH),
        LayerDesc(nn.Linear, WIDTH, VOCABULARY),
    )
    return [first, *middle, last]


def batch(rows: int, length: int, step: int = 0) -> list[Any]:
    """Tokens and the tokens that follow, int64 [rows, length]."""
    tokens = np.random.default_rng(step).integers(0, VOCABULARY, (rows, length + 1))
    return [paddle.to_tensor(tokens[:, :-1]), paddle.to_tensor(tokens[:, 1:])]


#: As the models of other tests; sequences of 7 are cut into a longer and a shorter slice.
MODEL = Model(layers, lambda micro_batches, step: batch(2 * micro_batches, 7, step), loss)
