"""Random models with attention, their sequences split in every way, beside plain Paddle.

python -m tests.processes.combinations.random_attention FIRST COUNT

From number 1000 on every pair and every triple of axes comes in turn, on up to eight ranks.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.distributed.fleet.utils import sequence_parallel_utils as paddles
from paddle.nn import functional

from fleetpipe import fleet
from fleetpipe.contrib import slices
from fleetpipe.dygraph import sequences
from fleetpipe.dygraph.sequences import ring
from fleetpipe.fleet.meta_parallel import (
    ColumnParallelLinear,
    LayerDesc,
    RowParallelLinear,
    SharedLayerDesc,
)
from tests.processes.combinations.beside_plain import Case, main, micro_batches

VOCABULARY = 11
#: By schedule, the chunks of a rank.
SCHEDULES = {
    **dict.fromkeys(("1F1B", "FThenB", "ZBH1"), 1),
    **dict.fromkeys(("ZBV", "Interleaved1F1B", "DualPipeV"), 2),
}
LAYOUTS: list[dict[str, int]] = [
    {"pp": 2},
    {"pp": 1, "sep": 2},
    {"pp": 1, "cp": 2},
    {"pp": 2, "sep": 2},
    {"pp": 2, "cp": 2},
    {"pp": 1, "mp": 2},
    {"pp": 2, "mp": 2},
    {"pp": 1, "sep": 4},
    {"pp": 1, "cp": 4},
    {"pp": 1, "sep": 2, "cp": 2},
    {"pp": 1, "mp": 2, "sep": 2},
    {"pp": 1, "mp": 2, "cp": 2},
    {"pp": 1, "dp": 2, "sep": 2},
    {"pp": 1, "sharding": 2, "cp": 2},
    {"pp": 1, "dp": 2, "mp": 2},
    {"pp": 2, "dp": 2},
]
#: Of the cases from number 1000 on.
COMBINATIONS = [
    {"pp": 1, **dict.fromkeys(axes, 2)}
    for count in (2, 3)
    for axes in itertools.combinations(("pp", "dp", "sharding", "mp", "sep", "cp"), count)
]


def turned(x: Any, positions: Any) -> Any:
    """Rotary positions of ``[rows, places, heads, size]``."""
    half = x.shape[-1] // 2
    rates = paddle.to_tensor([0.5**n for n in range(half)], x.dtype)
    angles = positions.astype(x.dtype).unsqueeze([-1, -1]) * rates
    left, right = x.split(2, axis=-1)
    sine, cosine = angles.sin(), angles.cos()
    return paddle.concat([left * cosine - right * sine, right * cosine + left * sine], axis=-1)


def attended(query: Any, key: Any, value: Any, seen: Any) -> Any:
    """Attention by one softmax; a key has as many heads as a query, or shares its own."""
    key, value = (
        part.repeat_interleave(query.shape[2] // key.shape[2], 2) for part in (key, value)
    )
    query, key, value = (part.transpose([0, 2, 1, 3]) for part in (query, key, value))
    scores = paddle.matmul(query, key, transpose_y=True) / query.shape[-1] ** 0.5
    scores = paddle.where(seen, scores, paddle.full([], -1e30, scores.dtype))
    return paddle.matmul(functional.softmax(scores), value).transpose([0, 2, 1, 3]).flatten(2)


def sequence_parallel(case: RandomCase) -> Any:
    """Returns Fleet's module of that name: fleetpipe's, or Paddle's own."""
    return paddles if case.number % 2 else fleet.utils.sequence_parallel_utils


class Embedding(nn.Layer):
    """Tokens, and learned positions or none; sequences are in parts from here on, or not."""

    takes_slices = True

    def __init__(self, case: RandomCase) -> None:
        super().__init__()
        self.case, self.tokens = case, nn.Embedding(VOCABULARY, case.width)
        if not case.rotary:
            self.places = nn.Embedding(case.length, case.width)

    @property
    def weight(self) -> Any:
        return self.tokens.weight

    def forward(self, value: Any) -> Any:
        ids, positions, documents = (value, None, None) if self.case.sliced else value
        if self.case.sliced:
            before = sum(slices.earlier(self))
            slices.keep(self, ids.shape[1])
            positions = paddle.arange(before, before + ids.shape[1]).expand(ids.shape)
        x = self.tokens(ids) if self.case.rotary else self.tokens(ids) + self.places(positions)
        if self.case.parallel:
            x = sequence_parallel(self.case).ScatterOp.apply(x.transpose([1, 0, 2]))
        return x if self.case.sliced else (x, positions, documents)


def logits(embedding: Any, value: Any) -> Any:
    x = value if embedding.case.sliced else value[0]
    if embedding.case.parallel:
        x = sequence_parallel(embedding.case).GatherOp.apply(x).transpose([1, 0, 2])
    return paddle.matmul(x, embedding.weight, transpose_y=True)


logits.takes_slices = True  # type: ignore[attr-defined]


class Head(nn.Layer):
    """Logits of a table of its own."""

    takes_slices = True

    def __init__(self, case: RandomCase) -> None:
        super().__init__()
        self.case = case
        self.weight = self.create_parameter([VOCABULARY, case.width])

    def forward(self, value: Any) -> Any:
        return logits(self, value)


def linear_layers(case: RandomCase) -> tuple[Any, Any]:
    """What makes the products whose columns, and whose rows, the members along mp share."""
    names, (column, row) = sequence_parallel(case), (ColumnParallelLinear, RowParallelLinear)
    if case.degrees.get("mp", 1) == 1:
        return nn.Linear, nn.Linear
    if case.parallel:
        column, row = names.ColumnSequenceParallelLinear, names.RowSequenceParallelLinear
    return (
        partial(column, has_bias=True, gather_output=False),
        partial(row, has_bias=True, input_is_parallel=True),
    )


class Attention(nn.Layer):
    """As Paddle's plans take it."""

    def forward(self, query: Any, key: Any, value: Any, causal: bool) -> Any:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=causal)


class Block(nn.Layer):
    """Attention and two products, of which this rank may have shards, and places."""

    takes_slices = True

    def __init__(self, case: RandomCase) -> None:
        super().__init__()
        self.case, self.size = case, case.width // case.heads
        self.norms = nn.LayerList([nn.LayerNorm(case.width) for _ in range(2)])
        column, row = linear_layers(case)
        for parameter in self.norms.parameters() if case.parallel else ():
            sequence_parallel(case).mark_as_sequence_parallel_parameter(parameter)
        self.query, self.both = (
            column(case.width, case.width),
            column(case.width, 2 * case.keys * self.size),
        )
        self.out = row(case.width, case.width)
        self.up, self.down = column(case.width, 2 * case.width), row(2 * case.width, case.width)
        self.inner = Attention()
        if case.planned:
            sequences.ContextParallel(case.planned).apply(self.inner)

    def forward(self, value: Any) -> Any:
        x, positions, documents = (value, None, None) if self.case.sliced else value
        x = x + self.out(self._attention(self.norms[0](x), positions, documents))
        x = x + self.down(functional.gelu(self.up(self.norms[1](x))))
        return x if self.case.sliced else (x, positions, documents)

    def _attention(self, x: Any, positions: Any, documents: Any) -> Any:
        case, query, both = self.case, self.query(x), self.both(x)
        if case.parallel:
            query, both = query.transpose([1, 0, 2]), both.transpose([1, 0, 2])
        rows, length, _ = query.shape
        query = query.reshape([rows, length, -1, self.size])
        key, value = both.reshape([rows, length, -1, 2 * self.size]).split(2, axis=-1)
        if case.sliced:
            kept = slices.earlier(self)
            before = sum(one[0].shape[1] for one in kept)
            positions = paddle.arange(before, before + length).expand([rows, length])
        if case.rotary:
            query, key = turned(query, positions), turned(key, positions)
        if case.sliced:
            slices.keep(self, (key, value))
            key, value = (paddle.concat([*one], 1) for one in zip(*kept, (key, value)))
            seen = paddle.tril(paddle.ones([length, before + length], "bool"), before)
            output = attended(query, key, value, seen)
        elif case.planned:
            output = self.inner(query, key, value, case.causal).flatten(2)
        else:
            documents = documents if case.packed else None
            output = sequences.attention(query, key, value, case.causal, documents).flatten(2)
        return output.transpose([1, 0, 2]) if case.parallel else output


class RandomCase(Case):
    """A model of attention by number."""

    def __init__(self, number: int) -> None:
        draw = random.Random(number)
        layouts = LAYOUTS if number < 1000 else COMBINATIONS
        self.number, self.degrees = number, {"dp": 1, **layouts[(number % 1000) % len(layouts)]}
        sep, cp, mp = (self.degrees.get(axis, 1) for axis in ("sep", "cp", "mp"))
        names = list(SCHEDULES)
        self.schedule = names[number // 3 % len(names)] if self.degrees["pp"] > 1 else "1F1B"
        self.sliced = sep * cp * mp == 1 and draw.random() < 0.5
        self.micro_batches, self.rows = draw.choice([1, 2, 3, 5]), draw.choice([1, 2, 3])
        self.parallel = mp > 1 and draw.random() < 0.7
        self.keys = sep * mp * draw.choice([1, 1, 2, 3])
        self.planned: str | None = None
        if not self.sliced and sep * cp > 1 and 1 in (sep, cp) and draw.random() < 0.3:
            self.planned = "all2all" if sep > 1 else "p2p"
        self.heads = self.keys * (1 if self.planned else draw.choice([1, 1, 2, 3]))
        # A LayerNorm of two numbers leaves their signs alone, which rounding may turn.
        self.width = self.heads * draw.choice([2, 4] if self.heads > 1 else [4, 8])
        self.length = sep * cp * (2 if cp > 1 else 1) * mp * draw.choice([1, 2, 3, 5])
        self.causal = self.sliced or draw.random() < 0.7
        self.packed = not (self.sliced or self.planned) and draw.random() < 0.6
        self.rotary, self.tied = draw.random() < 0.5, draw.random() < 0.5
        self.tile = draw.choice([2, 3, 512])
        self.dtype = draw.choice(["float64", "float64", "float32"])
        self.optimizer = draw.choice(["sgd", "momentum", "adam", "adamw", "adagrad"])
        self.clip = draw.choice([None, 0.1, 1.0])
        self.by_tokens = draw.random() < 0.5
        self.options = {"loss_reduction": "tokens"} if self.by_tokens else {}
        self.blocks = draw.choice([2, 3])
        if self.sliced:
            self.schedule, self.options["slices"] = (
                "Seq1F1B",
                min(draw.choice([1, 2, 3]), self.length),
            )
        self.layout = {"num_virtual_pipeline_stages": SCHEDULES.get(self.schedule, 1)}
        if not self.sliced and draw.random() < 0.3:
            self.layout |= {"recompute_interval": draw.choice([1, 2]), "recompute_ctx": {}}
        self.loss_fn = nn.CrossEntropyLoss(ignore_index=0)

    def entries(self) -> list[Any]:
        ring.TILE = self.tile
        ends: list[Any] = [LayerDesc(Embedding, self), LayerDesc(Head, self)]
        if self.tied:
            shared = {"case": self}
            ends = [
                SharedLayerDesc("table", Embedding, **shared),
                SharedLayerDesc("table", Embedding, logits, **shared),
            ]
        return [ends[0], *[LayerDesc(Block, self)] * self.blocks, ends[1]]

    def batch(self, step: int) -> list[Any]:
        """Documents of any length; labels of 0 do not count, and whole rows have no other."""
        numbers = np.random.default_rng([self.number, step])
        size = (self.replicas * self.micro_batches * self.rows, self.length)
        ids, labels = numbers.integers(0, VOCABULARY, (2, *size))
        labels[numbers.random(size) < np.linspace(0.9, 0, self.length)] = 0
        labels[1:][numbers.random(size[0] - 1) < 0.2] = 0
        labels[0, -1] = 1
        begins = numbers.random(size) < 0.2 * self.packed
        begins[:, 0] = True
        places = np.arange(self.length)
        positions = places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)
        inputs = tuple(map(paddle.to_tensor, (ids, positions, begins.cumsum(axis=1))))
        return [inputs[0] if self.sliced else inputs, paddle.to_tensor(labels)]

    def own_part(self, value: Any) -> Any:
        return value if self.sliced else sequences.own_part(value)

    def plain_loss(self, weights: Mapping[str, Any], batch: list[Any]) -> Any:
        """On whole sequences: the mean over places that count, of all or of each micro-batch."""
        parts = [micro_batches(self, value) for value in batch]
        counted, losses = [], []
        for inputs, labels in zip(*parts):
            count = (labels != 0).astype(self.dtype)
            scores = functional.log_softmax(self._scores(weights, inputs))
            chosen = (scores * functional.one_hot(labels, VOCABULARY)).sum(-1)
            losses.append(-(chosen * count).sum())
            counted.append(float(count.sum()))
        if self.by_tokens:
            return sum(losses) / sum(counted)
        return sum(loss / max(n, 1) for loss, n in zip(losses, counted)) / len(losses)

    def _scores(self, weights: Mapping[str, Any], inputs: Any) -> Any:
        ids = inputs if self.sliced else inputs[0]
        positions = paddle.arange(self.length).expand(ids.shape) if self.sliced else inputs[1]
        seen = paddle.ones([self.length, self.length], "bool")
        seen = paddle.tril(seen) if self.causal else seen
        if self.packed:
            same = inputs[2].unsqueeze(-1) == inputs[2].unsqueeze(-2)
            seen = paddle.logical_and(seen, same).unsqueeze(1)
        first = "shared_layers.table" if self.tied else "0"
        x = functional.embedding(ids, weights[f"{first}.tokens.weight"])
        if not self.rotary:
            x = x + functional.embedding(positions, weights[f"{first}.places.weight"])
        for number in range(1, self.blocks + 1):

            def product(name: str, value: Any, path: str = f"{number}.") -> Any:
                weight, bias = (weights[f"{path}{name}.{part}"] for part in ("weight", "bias"))
                if "norms" in name:
                    return functional.layer_norm(value, value.shape[-1:], weight, bias)
                return paddle.matmul(value, weight) + bias

            normed, size = product("norms.0", x), self.width // self.heads
            query = product("query", normed).reshape([*ids.shape, -1, size])
            both = product("both", normed).reshape([*ids.shape, -1, 2 * size])
            key, value = both.split(2, axis=-1)
            if self.rotary:
                query, key = turned(query, positions), turned(key, positions)
            x = x + product("out", attended(query, key, value, seen))
            x = x + product("down", functional.gelu(product("up", product("norms.1", x))))
        last = f"{first}.tokens" if self.tied else f"{self.blocks + 1}"
        return paddle.matmul(x, weights[f"{last}.weight"], transpose_y=True)


if __name__ == "__main__":
    main("tests.processes.combinations.random_attention")
