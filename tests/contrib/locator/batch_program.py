"""A user's GPT by ``train_batch``: pp, dp, sharding, sep, cp and ep; ``--bug NAME`` seeds one."""

# mypy: ignore-errors
# As users write it: Paddle types neither Fleet nor its layers.

from __future__ import annotations

import argparse
import os
import re
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer, SharedLayerDesc
from paddle.nn import functional as F

from fleetpipe.dygraph import sequences
from fleetpipe.dygraph.experts import AuxiliaryLoss, Experts

parser = argparse.ArgumentParser()
parser.add_argument("--bug", default="")
parser.add_argument("--experts", action="store_true")
parser.add_argument("--blocks", type=int, default=3)
parser.add_argument("--optimizer", default="AdamW")
parser.add_argument("--schedule", default="1F1B")
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--chunks", type=int, default=1)
parser.add_argument("--capacity", type=float, default=0.0)
parser.add_argument("--balance", type=float, default=0.0)
parser.add_argument("--masked", action="store_true")
parser.add_argument("--untied", action="store_true")
args = parser.parse_args()

DEGREES = dict.fromkeys(("pp", "dp", "sharding", "sep", "cp", "ep"), 1)
DEGREES.update(
    {axis: int(n) for axis, n in re.findall(r"([a-z]+)(\d+)", os.environ.get("DEGREES", ""))}
)
MANY = any(n > 1 for n in DEGREES.values())
REPLICAS = DEGREES["dp"] * DEGREES["sharding"]
PARTS = DEGREES["sep"] * DEGREES["cp"]
VOCABULARY, LENGTH, WIDTH, HEADS, BATCHES, ROWS = 29, 8, 8, 2, 4, 2


def bug(name: str) -> bool:
    return args.bug == name and MANY


strategy = fleet.DistributedStrategy()
strategy.hybrid_configs = {
    f"{axis}_degree": n for axis, n in DEGREES.items() if n > 1 or axis in ("pp", "dp", "sharding")
}
strategy.pipeline_configs = {
    "accumulate_steps": BATCHES // REPLICAS,
    "micro_batch_size": ROWS,
    "schedule_mode": args.schedule if DEGREES["pp"] > 1 else "1F1B",
}
# Without locate that bug is refused before the first step.
strategy.fleetpipe_configs = {"compare_rows": not bug("shuffled-by-rank")}
fleet.init(is_collective=True, strategy=strategy)
hcg = fleet.get_hybrid_communicate_group()
stage, rank = hcg.get_stage_id(), dist.get_rank()
last = stage == DEGREES["pp"] - 1
replica = hcg.get_data_parallel_rank() * DEGREES["sharding"] + hcg.get_sharding_parallel_rank()
paddle.seed(23)


class Embedding(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)

    @property
    def weight(self) -> Any:
        return self.tokens.weight

    def forward(self, value: Any) -> Any:
        ids, places = value
        if bug("positions-from-zero"):
            places = paddle.arange(ids.shape[1]).expand(ids.shape)
        return self.tokens(ids) + self.positions(places)


class Attention(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).reshape([rows, length, HEADS, -1]).split(3, axis=-1)
        if bug("local-attention"):
            scores = paddle.einsum("blhd,bmhd->bhlm", q, k) / q.shape[-1] ** 0.5
            scores = scores + paddle.triu(paddle.full([length, length], -1e9), 1)
            seen = paddle.einsum("bhlm,bmhd->blhd", F.softmax(scores), v)
        else:
            seen = sequences.attention(q, k, v, causal=not bug("not-causal"))
        return self.out(seen.reshape([rows, length, width]))


class Mixture(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = Experts(lambda: nn.Linear(WIDTH, WIDTH), 4)

    def forward(self, x: Any) -> Any:
        tokens = x.reshape([-1, x.shape[-1]])
        scores = F.softmax(self.router(tokens))
        self.loss = (scores**2).mean()
        weights, choices = paddle.topk(scores, 2)
        if args.capacity:
            ranks = hcg.get_expert_parallel_world_size() if bug("capacity-by-ranks") else 1
            room = int(args.capacity * len(tokens) / 2) // ranks
            counted = F.one_hot(choices.reshape([-1]), 4).cumsum(0).reshape([-1, 2, 4])
            place = paddle.take_along_axis(counted, choices.unsqueeze(-1), -1).squeeze(-1)
            choices = paddle.where(place > room, paddle.full_like(choices, -1), choices)
        if bug("weights-not-given"):
            weights = paddle.ones_like(weights) / 2
        return self.experts(tokens, choices, weights).reshape(x.shape)


class Block(nn.Layer):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        if bug("number-within-stage") and stage == 1:
            self.number = 1
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        if args.experts:
            self.mixture = Mixture()
        else:
            self.mixture = nn.Sequential(
                nn.Linear(WIDTH, 4 * WIDTH), nn.Silu(), nn.Linear(4 * WIDTH, WIDTH)
            )
        rate = args.dropout * (2 if bug("dropout-by-stage") and stage else 1)
        self.dropout = nn.Dropout(rate)

    def forward(self, x: Any) -> Any:
        if bug("half-in-a-stage") and stage == 1:
            x = x.astype("float16").astype("float32")
        if bug("detached") and self.number == 2:
            x = x.detach()
        x = x + self.attention(self.before(x)) / self.number
        return x + self.dropout(self.mixture(self.after(x)))


def logits(embedding: Any, hidden: Any) -> Any:
    return paddle.matmul(hidden, embedding.weight, transpose_y=True)


class Loss(nn.Layer):
    def forward(self, columns: Any, following: Any) -> Any:
        if bug("shifted-again"):
            columns, following = columns[:, :-1], following[:, 1:]
        if args.masked:
            each = F.cross_entropy(columns, following.unsqueeze(-1), reduction="none").squeeze(-1)
            weight = (following > 9).astype(each.dtype)
            return (each * weight).sum() / weight.sum()
        loss = F.cross_entropy(columns, following.unsqueeze(-1))
        return loss / (BATCHES // REPLICAS) if bug("divided-twice") else loss


def descriptions() -> list[Any]:
    middle = [
        *(LayerDesc(Block, 1 + number) for number in range(args.blocks)),
        LayerDesc(nn.LayerNorm, WIDTH),
    ]
    if args.untied:
        return [LayerDesc(Embedding), *middle, LayerDesc(nn.Linear, WIDTH, VOCABULARY)]
    shared = {"shared_weight_attr": "weight"}
    return [
        SharedLayerDesc("table", Embedding, **shared),
        *middle,
        SharedLayerDesc("table", Embedding, forward_func=logits, **shared),
    ]


def batch(step: int) -> Any:
    random = np.random.default_rng(17 + step)
    rows = random.integers(0, VOCABULARY, [BATCHES * ROWS, LENGTH + 1])
    count = len(rows) // REPLICAS
    mine = rows[replica * count : (replica + 1) * count]
    if bug("shuffled-by-rank") and last:
        mine = np.random.default_rng(rank).permutation(mine)
    tokens, following = mine[:, :-1].copy(), mine[:, 1:].copy()
    if bug("label-not-shifted") and last:
        following = tokens.copy()
    places = np.tile(np.arange(LENGTH), [len(mine), 1])
    whole = [(paddle.to_tensor(tokens), paddle.to_tensor(places)), paddle.to_tensor(following)]
    if bug("parts-in-order"):
        count = LENGTH // PARTS
        place = hcg.get_sep_parallel_rank() if DEGREES["sep"] > 1 else rank
        part = slice(place * count, (place + 1) * count)
        (tokens, places), following = whole
        return [(tokens[:, part], places[:, part]), following[:, part]]
    if bug("labels-within-part"):
        inputs = sequences.own_part(whole[0])
        return [inputs, paddle.roll(inputs[0], -1, 1)]
    return sequences.own_part(whole) if PARTS > 1 else whole


def balance(layer: Any) -> Any:
    return layer.loss if isinstance(layer, Mixture) else None


loss_fn = Loss()
if args.balance:
    more = DEGREES["ep"] if bug("balance-by-ep") else 1
    loss_fn = AuxiliaryLoss(loss_fn, args.balance * more, take=balance)


model = fleet.distributed_model(
    PipelineLayer(
        descriptions(),
        num_stages=DEGREES["pp"],
        loss_fn=loss_fn,
        **({"num_virtual_pipeline_stages": args.chunks} if args.chunks > 1 else {}),
    )
)
parameters = list(model.parameters())

tables = [p for p in parameters if VOCABULARY in p.shape]
if bug("head-drawn-again") and last:
    tables[-1].set_value(paddle.randn(tables[-1].shape) * 0.02)
if bug("norm-frozen") and last:
    next(p for p in reversed(parameters) if p.shape == [WIDTH]).stop_gradient = True
if bug("tied-scaled"):
    reduce = PipelineLayer.allreduce_shared_weight_gradients

    def halved(layer: Any) -> None:
        reduce(layer)
        with paddle.no_grad():
            for table in tables:
                table.grad.scale_(0.5)

    PipelineLayer.allreduce_shared_weight_gradients = halved
if bug("doubled-on-one") and rank == dist.get_world_size() - 1:
    next(p for p in parameters if p.shape == [WIDTH, 3 * WIDTH]).register_hook(lambda g: g * 2)
if bug("router-not-reduced"):
    for p in parameters:
        if p.shape == [WIDTH, 4]:
            p.no_sync = True
            p.is_distributed = False
if bug("expert-twice") and rank:
    next(p for p in reversed(parameters) if getattr(p, "no_sync", False)).register_hook(
        lambda g: g * 2
    )
rate = 0.02 if bug("rate-by-stage") and last else 0.01
kind = getattr(paddle.optimizer, args.optimizer)
decay = {} if args.optimizer != "AdamW" else {"weight_decay": 0.1}
if bug("decay-on-last") and last:
    decay = {"weight_decay": 0.0}
if bug("decay-on-one") and rank:
    decay = {"weight_decay": 0.0}
trained = parameters
if bug("last-stage-left-out") and last:
    trained = [p for p in parameters if p.shape != [WIDTH]]
optimizer = kind(rate, parameters=trained, grad_clip=nn.ClipGradByGlobalNorm(0.05), **decay)
if not bug("optimizer-of-its-own"):
    optimizer = fleet.distributed_optimizer(optimizer)
for step in range(4):
    loss = model.train_batch(batch(step), optimizer)
    if bug("norm-changed-on-one") and rank == 1:
        with paddle.no_grad():
            next(p for p in parameters if p.shape == [WIDTH]).scale_(1.001)
    print(step, float(loss), flush=True)
if hasattr(fleet, "shutdown"):
    fleet.shutdown()
