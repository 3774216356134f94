"""Layers of right programs whose sequences or experts are spread over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import paddle
from paddle import nn
from paddle.nn import functional

from fleetpipe import fleet
from fleetpipe.contrib.experts import Experts
from fleetpipe.dygraph import sequences
from fleetpipe.dygraph.tensor_parallel import share_of
from fleetpipe.fleet.meta_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    get_rng_state_tracker,
)

if TYPE_CHECKING:
    from tests.contrib.locator.right_programs import Program

HEADS, EXPERTS, PLACES, WIDTH = 4, 4, 8, 8
parts: Any = fleet.utils.sequence_parallel_utils
tracker_of: Any = get_rng_state_tracker


class Embedding(nn.Layer):
    """Tokens and their positions; of the sequence, the first axis, each member has a part."""

    def __init__(self, program: Program, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.positions = nn.Embedding(PLACES, WIDTH)
        self.in_parts = program.in_parts

    @property
    def weight(self) -> Any:
        return self.tokens.weight

    def forward(self, value: Any) -> Any:
        x = self.tokens(value[0]) + self.positions(value[1])
        return parts.ScatterOp.apply(x.transpose([1, 0, 2])) if self.in_parts else x


class Gathered(nn.Layer):
    """Whole sequences again."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.in_parts = program.in_parts

    def forward(self, x: Any) -> Any:
        return parts.GatherOp.apply(x).transpose([1, 0, 2]) if self.in_parts else x


def products(program: Program) -> tuple[Any, Any]:
    """Returns what makes a product that mp splits by columns, and one that it splits by rows."""
    if program.in_parts:
        return parts.ColumnSequenceParallelLinear, parts.RowSequenceParallelLinear
    return ColumnParallelLinear, RowParallelLinear


class Products(nn.Sequential):
    """Two products."""

    def __init__(self, program: Program) -> None:
        width, (column, row) = WIDTH, products(program)
        up, down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        if "mp" in program.axes:
            up = column(width, 2 * width, has_bias=True, gather_output=False)
            down = row(2 * width, width, has_bias=True, input_is_parallel=True)
        super().__init__(up, nn.GELU(), down)


def expert() -> nn.Layer:
    """Returns an expert."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


class Routed(nn.Layer):
    """A router of the user's, and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.mixture = Experts(expert, EXPERTS)
        self.loss: Any = None

    def forward(self, x: Any) -> Any:
        tokens = x.reshape([-1, x.shape[-1]])
        scores = functional.softmax(self.router(tokens))
        self.loss = (scores**2).mean()
        weights, choices = paddle.topk(scores, 2)
        return self.mixture(tokens, choices, weights).reshape(x.shape)

    def get_loss(self) -> Any:
        loss, self.loss = self.loss, None
        return loss


class Block(nn.Layer):
    """Attention and two products, or experts."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        width, (column, row) = WIDTH, products(program)
        self.heads, self.in_parts = HEADS, program.in_parts
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv: Any = nn.Linear(width, 3 * width)
        self.out: Any = nn.Linear(width, width)
        if "mp" in program.axes:
            self.heads = share_of(HEADS, "num_heads")
            self.qkv = column(width, 3 * width, has_bias=True, gather_output=False)
            self.out = row(width, width, has_bias=True, input_is_parallel=True)
        self.inner = Routed() if program.mixture else Products(program)
        self.dropout = nn.Dropout(program.dropout)
        if self.in_parts:
            for parameter in [*self.before.parameters(), *self.after.parameters()]:
                parts.mark_as_sequence_parallel_parameter(parameter)

    def forward(self, x: Any) -> Any:
        x = x + self.dropped(self.attended(self.before(x)))
        return x + self.dropped(self.inner(self.after(x)))

    def dropped(self, x: Any) -> Any:
        if not self.in_parts:
            return self.dropout(x)
        with tracker_of().rng_state("local_seed"):
            return self.dropout(x)

    def attended(self, x: Any) -> Any:
        x = self.qkv(x)
        x = x.transpose([1, 0, 2]) if self.in_parts else x
        rows, length, _ = x.shape
        q, k, v = x.reshape([rows, length, self.heads, -1]).split(3, axis=-1)
        x = sequences.attention(q, k, v, causal=True).reshape([rows, length, -1])
        return self.out(x.transpose([1, 0, 2]) if self.in_parts else x)
