"""A small GPT as a list of layers: the embedding is also the head, and every block is a layer.

Its weights are those of Paddle's tensor-parallel layers, which are ordinary ones where
``mp_degree`` is 1. A value between layers is the hidden state ``[rows, length, width]``, whole on
every member; only inside of a block is it cut along the heads.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import paddle
from paddle import nn
from paddle.nn import functional as F

from fleetpipe.dygraph import slices
from fleetpipe.dygraph.tensor_parallel import dropout, parallel_matmul
from fleetpipe.fleet.meta_parallel import (
    ColumnParallelLinear,
    LayerDesc,
    ParallelCrossEntropy,
    PipelineLayer,
    RowParallelLinear,
    SharedLayerDesc,
    VocabParallelEmbedding,
)

NORMAL = nn.initializer.Normal(0.0, 0.02)


class Embedding(nn.Layer):
    """Vectors of tokens, int64 [rows, length]: the first layer, and with its rows the last."""

    takes_slices = True

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.table = VocabParallelEmbedding(
            vocabulary, width, weight_attr=paddle.ParamAttr(initializer=NORMAL)
        )

    @property
    def weight(self) -> Any:
        """The rows of this member: what both uses of the layer share."""
        return self.table.weight

    def forward(self, tokens: Any) -> Any:
        """Looks up tokens."""
        return self.table(tokens)


def logits(embedding: Embedding, hidden: Any) -> Any:
    """Returns this member's columns of the logits, [rows, length, vocabulary / mp]."""
    return parallel_matmul(hidden, embedding.weight)


logits.takes_slices = True  # type: ignore[attr-defined]


class Positions(nn.Layer):
    """Adds a learnt vector for each place in the row."""

    takes_slices = True

    def __init__(self, length: int, width: int, dropout: float) -> None:
        super().__init__()
        self.table = nn.Embedding(length, width, weight_attr=paddle.ParamAttr(initializer=NORMAL))
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Any) -> Any:
        """Takes and returns [rows, length, width]."""
        length = hidden.shape[1]
        begin = sum(slices.earlier(self))
        slices.keep(self, length)
        return self.dropout(hidden + self.table(paddle.arange(begin, begin + length)))


class Block(nn.Layer):
    """Causal self-attention, then a multilayer perceptron, each added to what came in."""

    takes_slices = True

    def __init__(
        self, width: int, heads: int, dropout: float, attention_dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.attention_dropout = attention_dropout
        self.head_width = width // heads
        self.attention_norm = nn.LayerNorm(width)
        # The columns stand head by head, each with its q, k and v: a slice holds whole heads. No
        # bias: that of k drops out of the softmax, and Adam would train it on rounding errors.
        self.qkv = _column(width, 3 * width, bias=False)
        self.projection = _row(width, width)
        self.perceptron_norm = nn.LayerNorm(width)
        self.widen = _column(width, 4 * width)
        self.narrow = _row(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Any) -> Any:
        """Takes and returns [rows, length, width]."""
        hidden = hidden + self.dropout(self._attend(self.attention_norm(hidden)))
        widened = F.gelu(self.widen(self.perceptron_norm(hidden)))
        return hidden + self.dropout(self.narrow(widened))

    def _attend(self, hidden: Any) -> Any:
        rows, length, _ = hidden.shape
        qkv = self.qkv(hidden).reshape([rows, length, -1, 3 * self.head_width])
        query, key, value = qkv.transpose([0, 2, 1, 3]).split(3, axis=-1)
        kept = slices.earlier(self)
        slices.keep(self, (key, value))
        if kept:
            # A slice of the sequence sees the ones before it.
            keys, values = zip(*kept, (key, value))
            key, value = paddle.concat(keys, axis=2), paddle.concat(values, axis=2)
        scores = paddle.matmul(query, key, transpose_y=True) / math.sqrt(self.head_width)
        shares = F.softmax(scores + _causal(length, key.shape[2]))
        shares = dropout(shares, self.attention_dropout, axis=1, training=self.training)
        seen = paddle.matmul(shares, value)
        return self.projection(seen.transpose([0, 2, 1, 3]).reshape([rows, length, -1]))


def _column(inputs: int, outputs: int, bias: bool = True) -> Any:
    attr = paddle.ParamAttr(initializer=NORMAL)
    return ColumnParallelLinear(inputs, outputs, attr, has_bias=bias, gather_output=False)


def _row(inputs: int, outputs: int) -> Any:
    attr = paddle.ParamAttr(initializer=NORMAL)
    return RowParallelLinear(inputs, outputs, attr, has_bias=True, input_is_parallel=True)


@functools.cache
def _causal(length: int, seen: int) -> Any:
    """Returns what keeps the last ``length`` of the ``seen`` places from seeing later ones."""
    return paddle.triu(paddle.full([length, seen], -1e9), diagonal=1 + seen - length)


class NextTokenLoss(nn.Layer):
    """The mean cross-entropy of the tokens that follow."""

    def __init__(self) -> None:
        super().__init__()
        self.entropy = ParallelCrossEntropy()

    def counted(self, following: Any) -> int:
        """Returns how many places the mean is over: all."""
        return int(following.size)

    def forward(self, columns: Any, following: Any) -> Any:
        """Takes this member's logits and the tokens, int64 [rows, length]."""
        return self.entropy(columns, following.unsqueeze(-1)).mean()


def gpt(args: Any, vocabulary: int, attention_dropout: float = 0.0, **kwargs: Any) -> Any:
    """Returns the model as a ``PipelineLayer`` of 2 x 2 + ``args.blocks`` layers."""
    block = (args.width, args.heads, args.dropout, attention_dropout)
    shared = {"shared_weight_attr": "weight", "vocabulary": vocabulary, "width": args.width}
    layers = [
        SharedLayerDesc("embedding", Embedding, **shared),
        LayerDesc(Positions, args.length, args.width, args.dropout),
        *[LayerDesc(Block, *block) for _ in range(args.blocks)],
        LayerDesc(nn.LayerNorm, args.width),
        SharedLayerDesc("embedding", Embedding, forward_func=logits, **shared),
    ]
    return PipelineLayer(layers=layers, loss_fn=NextTokenLoss(), seg_method="layer:Block", **kwargs)
