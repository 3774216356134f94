"""Plain models of the kinds that people train, small, and their training beside their captures."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import nn

import fleetpipe
from fleetpipe import fleet
from fleetpipe.capture.running.stages import call_keyed, loss_input
from fleetpipe.dygraph.nest import map_tensors
from fleetpipe.schedules.action import GlobalMicroBatch
from tests.pipelines import accumulate, bits, job

IMAGE_CLASSES = 10


class Result(NamedTuple):
    """What came of it.

    Attributes:
        pipe: The captured model.
        model: It, wrapped.
        plain: The plain model, after the same steps.
        differing: What differs: "step 0 loss", "step 0 gradient of fc.weight", ...
    """

    pipe: Any
    model: Any
    plain: Any
    differing: list[str]


def images(rows: int, size: int = 32, seed: int = 0) -> list[Any]:
    """[images, labels]: rows x 3 x size x size, and classes."""
    numbers = np.random.default_rng(seed)
    return [
        paddle.to_tensor(numbers.standard_normal((rows, 3, size, size)).astype("float32")),
        paddle.to_tensor(numbers.integers(0, IMAGE_CLASSES, (rows, 1))),
    ]


def trained(
    build: Callable[[], Any],
    data: list[Any],
    *,
    micro_batches: int = 4,
    steps: int = 2,
    loss_fn: Any = None,
    keyed: bool = False,
    **options: Any,
) -> Result:
    """Trains by SGD in the current job, of one process, and compares losses, gradients, state.

    Args:
        build: Makes the plain model.
        data: The inputs and the labels of a batch, used in every step.
        micro_batches: Those of the job.
        steps: How many.
        loss_fn: By default the cross entropy.
        keyed: Whether the plain model draws random numbers under the pipeline's keys.
        options: Those of ``fleetpipe.pipeline``, by default without a proof.
    """
    loss_fn = loss_fn or nn.CrossEntropyLoss()
    paddle.seed(7)
    model = build()
    plain, state = copy.deepcopy(model), model.state_dict()
    parts = _micro_batches(data, micro_batches)
    options = {"verify": False, **options}
    pipe = fleetpipe.pipeline(model, parts[0][0], loss_fn=loss_fn, **options)
    assert all(model.state_dict()[n] is tensor and tensor.is_leaf for n, tensor in state.items())
    differing = _different("start", pipe.state_dict(), plain.state_dict())
    wrapped = fleet.distributed_model(pipe)
    ours = paddle.optimizer.SGD(0.05, parameters=pipe.parameters())
    theirs = paddle.optimizer.SGD(0.05, parameters=plain.parameters())
    plain.train()
    for step in range(steps):
        keys = wrapped.next_keys() if keyed else None
        loss = wrapped.forward_backward_pipeline(data)
        total = accumulate(
            loss_fn(called(pipe, plain, inputs, keys, number), labels) / micro_batches
            for number, (inputs, labels) in enumerate(parts)
        )
        differing += _different(f"step {step}", {"loss": loss}, {"loss": total})
        differing += _different(f"step {step} gradient of", _gradients(pipe), _gradients(plain))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.clear_grad()
        differing += _different(f"step {step}", pipe.state_dict(), plain.state_dict())
    return Result(pipe, wrapped, plain, differing)


def called(pipe: Any, plain: nn.Layer, inputs: Any, keys: Any, number: int) -> Any:
    """What the loss takes of the plain model, which draws as the pipeline does with ``keys``."""
    unopened = pipe.captures.capturer.unopened
    return loss_input(plain, call_keyed(plain, inputs, unopened, keys, GlobalMicroBatch(number)))


def require_bits(
    build: Callable[[], Any],
    data: list[Any],
    split_spec: Any = "auto",
    schedule: str = "1F1B",
    **options: Any,
) -> Result:
    """Trains in a job of as many stages as ``split_spec`` says, or two, with the plain bits."""
    stages = 2 if split_spec == "auto" else len(split_spec) + 1
    with job(stages // options.get("num_chunks", 1), options.get("micro_batches", 4), schedule):
        done = trained(build, data, split_spec=split_spec, **options)
    assert done.differing == []
    return done


def _micro_batches(data: list[Any], count: int) -> list[tuple[Any, Any]]:
    def rows(part: Any, i: int) -> Any:
        return map_tensors(lambda t: t[len(t) // count * i : len(t) // count * (i + 1)], part)

    return [(rows(data[0], i), rows(data[1], i)) for i in range(count)]


def _gradients(model: Any) -> dict[str, Any]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _different(what: str, ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    ours, theirs = bits(ours), bits(theirs)
    return [f"{what} {n}" for n in {**ours, **theirs} if ours.get(n) != theirs.get(n)]


WORDS, LENGTH, WIDTH = 23, 6, 16


def tokens(rows: int, length: int = LENGTH, seed: int = 0) -> Any:
    """Token ids [rows, length]."""
    return paddle.to_tensor(np.random.default_rng(seed).integers(0, WORDS, (rows, length)))


class Rotary(nn.Layer):  # type: ignore[misc]
    """Rotary embeddings: called by every block, with the same tables."""

    def __init__(self, width: int) -> None:
        super().__init__()
        steps = paddle.arange(0, width, 2, dtype="float32")
        self.register_buffer("frequencies", 1.0 / 10.0 ** (steps / width), persistable=False)

    def forward(self, x: Any, positions: Any) -> Any:
        angles = positions.astype("float32").unsqueeze(-1) * self.frequencies
        cosine, sine = angles.cos(), angles.sin()
        even, odd = x[..., 0::2], x[..., 1::2]
        turned = paddle.stack([even * cosine - odd * sine, even * sine + odd * cosine], -1)
        return turned.flatten(-2)


class Block(nn.Layer):  # type: ignore[misc]
    """Attention and a feed-forward, each with a skip; returns the keys and values too."""

    def __init__(self, rotary: Rotary, dropout: float) -> None:
        super().__init__()
        self.rotary = rotary
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.dropout = dropout

    def forward(self, x: Any, positions: Any, mask: Any = None, use_cache: bool = True) -> Any:
        query, key, value = self.mix(self.before(x)).chunk(3, -1)
        query, key = self.rotary(query, positions), self.rotary(key, positions)
        scores = paddle.matmul(query, key, transpose_y=True) / WIDTH**0.5
        if mask is not None:
            scores = scores + mask
        weights = nn.functional.softmax(scores)
        x = x + nn.functional.dropout(self.out(weights @ value), self.dropout, self.training)
        return x + self.feed(self.after(x)), ((key, value) if use_cache else None)


class GPT(nn.Layer):  # type: ignore[misc]
    """Tied embedding, rotary tables used in every stage, a mask made once, and a cache."""

    def __init__(self, blocks: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.rotary = Rotary(WIDTH)
        self.blocks = nn.LayerList([Block(self.rotary, dropout) for _ in range(blocks)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Any, use_cache: bool = False) -> Any:
        length = ids.shape[1]
        positions = paddle.arange(length).unsqueeze(0)
        mask = paddle.triu(paddle.full([length, length], -1e4), 1)
        x, cache = self.embed(ids), []
        for block in self.blocks:
            x, kept = block(x, positions, mask=mask, use_cache=use_cache)
            cache.append(kept)
        logits = paddle.matmul(self.norm(x), self.embed.weight, transpose_y=True)
        return {"logits": logits, "cache": cache} if use_cache else logits


class UNet(nn.Layer):  # type: ignore[misc]
    """Two levels down and up again, with a skip at each."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = self._convolved(3, 4), self._convolved(4, 8)
        self.middle = self._convolved(8, 8)
        self.up2, self.up1 = self._convolved(16, 4), self._convolved(8, 4)
        self.head = nn.Conv2D(4, 2, 1)
        self.pool = nn.MaxPool2D(2)

    @staticmethod
    def _convolved(inputs: int, outputs: int) -> Any:
        return nn.Sequential(
            nn.Conv2D(inputs, outputs, 3, padding=1), nn.BatchNorm2D(outputs), nn.ReLU()
        )

    def forward(self, x: Any) -> Any:
        high = self.down1(x)
        low = self.down2(self.pool(high))
        y = self.middle(self.pool(low))
        y = nn.functional.interpolate(y, size=low.shape[2:], mode="nearest")
        y = self.up2(paddle.concat([y, low], 1))
        y = nn.functional.interpolate(y, size=high.shape[2:], mode="nearest")
        return self.head(self.up1(paddle.concat([y, high], 1)))


class Tagger(nn.Layer):  # type: ignore[misc]
    """An embedding, a bidirectional LSTM, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, 8, num_layers=2, direction="bidirect")
        self.head = nn.Linear(16, WORDS)

    def forward(self, ids: Any) -> Any:
        hidden, _ = self.lstm(self.embed(ids))
        return self.head(hidden)


class TwoTowers(nn.Layer):  # type: ignore[misc]
    """Two inputs by name, one embedding, two towers, and a number that scales the product."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.left = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.right = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, query: Any, answer: Any, scale: float = 2.0) -> Any:
        left = self.left(self.embed(query).mean(1))
        right = self.right(self.embed(answer).mean(1))
        return (left @ right.T) * scale, left, right


class Encoded(nn.Layer):  # type: ignore[misc]
    """``nn.Transformer`` between an embedding and a head: every decoder layer takes the memory."""

    def __init__(self, masked: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 2, 4, 32, dropout=0.0)
        self.head = nn.Linear(WIDTH, WORDS)
        self.masked = masked

    def forward(self, source: Any, target: Any, source_mask: Any = None) -> Any:
        mask = None
        if self.masked:
            mask = self.transformer.generate_square_subsequent_mask(target.shape[1])
        source, target = self.embed(source), self.embed(target)
        return self.head(self.transformer(source, target, source_mask, mask, source_mask))


class Experts(nn.Layer):  # type: ignore[misc]
    """A gate weighs every expert's output: no shape depends on the data. Returns a loss too."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts)
        self.experts = nn.LayerList(
            [
                nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, WIDTH))
                for _ in range(experts)
            ]
        )

    def forward(self, x: Any) -> Any:
        weights = nn.functional.softmax(self.gate(x))
        best, chosen = weights.topk(2, -1)
        kept = paddle.zeros_like(weights).put_along_axis(chosen, best, -1)
        outputs = paddle.stack([expert(x) for expert in self.experts], -1)
        balance = (weights.mean([0, 1]) * (kept > 0).astype("float32").mean([0, 1])).sum()
        return x + (outputs * kept.unsqueeze(-2)).sum(-1), balance


class Mixture(nn.Layer):  # type: ignore[misc]
    """Blocks of experts, whose losses are added up beside the output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.LayerList([Experts() for _ in range(3)])

    def forward(self, ids: Any) -> Any:
        x, balance = self.embed(ids), paddle.zeros([])
        for block in self.blocks:
            x, more = block(x)
            balance = balance + more
        return {"logits": self.head(x), "balance": balance}


class Residual(nn.Layer):  # type: ignore[misc]
    """Blocks with dropouts, one of them glue, each around a skip."""

    def __init__(self, blocks: int = 8, dropout: float = 0.25) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 10)
        self.blocks = nn.LayerList([nn.Linear(WIDTH, WIDTH) for _ in range(blocks)])
        self.drop = nn.Dropout(dropout)
        self.dropout = dropout

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for block in self.blocks:
            y = nn.functional.dropout(block(x).tanh(), self.dropout, self.training)
            x = x + self.drop(y)
        return self.last(x)
