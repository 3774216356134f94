"""A stack of GPT blocks: what the benchmarks train, in a pipeline and in a single process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle import nn

from fleetpipe.fleet.meta_parallel import LayerDesc


@dataclass(frozen=True)
class Case:
    """A model and a batch; every row of the batch is a sequence of vectors.

    Attributes:
        hidden: Size of a vector.
        blocks: Number of blocks.
        heads: Heads of the attention.
        length: Vectors in a sequence.
        micro_batches: Micro-batches of a batch, m.
        rows: Sequences in a micro-batch.
        ranks: Ranks of the pipeline, p.
    """

    hidden: int
    blocks: int
    heads: int
    length: int
    micro_batches: int
    rows: int
    ranks: int = 2

    @property
    def ideal(self) -> float:
        """The speed-up of p equal stages over one process: p m / (m + p - 1)."""
        return self.ranks * self.micro_batches / (self.micro_batches + self.ranks - 1)

    def layers(self) -> list[Any]:
        """Returns the blocks as a list for ``PipelineLayer``."""
        return [LayerDesc(Block, self.hidden, self.heads, self.length) for _ in range(self.blocks)]

    def batch(self) -> list[Any]:
        """Returns [inputs, targets], each [micro_batches * rows, length, hidden], float32."""
        shape = (self.micro_batches * self.rows, self.length, self.hidden)
        numbers = np.random.default_rng(0)
        return [paddle.to_tensor(numbers.standard_normal(shape, "float32")) for _ in range(2)]


CASES = {
    "gpt 256": Case(hidden=256, blocks=8, heads=8, length=128, micro_batches=16, rows=1),
    "gpt 768": Case(hidden=768, blocks=8, heads=8, length=128, micro_batches=8, rows=1),
    "tiny": Case(hidden=32, blocks=2, heads=2, length=16, micro_batches=64, rows=1),
}


class Block(nn.Layer):
    """Attention and a feed-forward layer four times as wide, each after a norm and in a residual.

    Args:
        hidden: Size of a vector.
        heads: Heads of the attention.
        length: Vectors in a sequence; each attends to itself and to those before it.
    """

    def __init__(self, hidden: int, heads: int, length: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = nn.MultiHeadAttention(hidden, heads)
        self.feed_norm = nn.LayerNorm(hidden)
        self.feed = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )
        self.mask = paddle.triu(paddle.full([length, length], -1e9), 1)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = x + self.attention(self.attention_norm(x), attn_mask=self.mask)
        return x + self.feed(self.feed_norm(x))
