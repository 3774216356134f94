"""A user's training script of any degrees, into which one bug may be put: ``--bug NAME``.

    DEGREES=pp2 fleetpipe locate --nproc 2 --twin DEGREES= program.py --bug tied-not-reduced

``--loop`` trains by forward, backward and step of its own; else by ``train_batch``.
"""

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
from paddle.distributed.fleet.meta_parallel import (
    ColumnParallelLinear,
    LayerDesc,
    PipelineLayer,
    RowParallelLinear,
    SharedLayerDesc,
    VocabParallelEmbedding,
)
from paddle.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--bug", default="")
parser.add_argument("--loop", action="store_true")
parser.add_argument("--micro-batches", type=int, default=4, help="of all replicas")
parser.add_argument("--dropout", type=float, default=0.0)
args = parser.parse_args()

DEGREES = dict.fromkeys(("pp", "dp", "mp", "sharding"), 1)
DEGREES.update(
    {axis: int(n) for axis, n in re.findall(r"([a-z]+)(\d+)", os.environ.get("DEGREES", ""))}
)
MANY = any(n > 1 for n in DEGREES.values())
REPLICAS = DEGREES["dp"] * DEGREES["sharding"]
VOCABULARY, LENGTH, ROWS, WIDTH, BLOCKS = 32, 6, 2, 16, 2
STEPS, SEED = 3, 7


def bug(name: str) -> bool:
    """Whether this bug is in, which one device does not have."""
    return args.bug == name and MANY


strategy = fleet.DistributedStrategy()
strategy.hybrid_configs = {f"{axis}_degree": n for axis, n in DEGREES.items()}
strategy.pipeline_configs = {
    "accumulate_steps": args.micro_batches // REPLICAS,
    "micro_batch_size": ROWS,
}
fleet.init(is_collective=True, strategy=strategy)
hcg = fleet.get_hybrid_communicate_group()
replica = hcg.get_data_parallel_rank() * DEGREES["sharding"] + hcg.get_sharding_parallel_rank()
stage = hcg.get_stage_id()
paddle.seed(SEED)


class Embedding(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.table = VocabParallelEmbedding(VOCABULARY, WIDTH)

    @property
    def weight(self) -> Any:
        return self.table.weight

    def forward(self, tokens: Any) -> Any:
        return self.table(tokens)


class Row(RowParallelLinear):
    """Adds up over mp, or forgets to."""

    def forward(self, hidden: Any) -> Any:
        if bug("row-not-reduced"):
            return F.linear(hidden, self.weight, self.bias)
        if bug("row-bias-twice"):
            return super().forward(hidden) + self.bias
        return super().forward(hidden)


class Column(ColumnParallelLinear):
    """Adds up the gradient of its input over mp, or forgets to."""

    def forward(self, hidden: Any) -> Any:
        if bug("column-backward-not-reduced"):
            return F.linear(hidden, self.weight, self.bias)
        return super().forward(hidden)


class Block(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        if bug("epsilon"):
            self.norm._epsilon = 1e-4
        self.widen = Column(WIDTH, 4 * WIDTH, has_bias=True, gather_output=False)
        self.narrow = Row(4 * WIDTH, WIDTH, has_bias=True, input_is_parallel=True)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, hidden: Any) -> Any:
        widened = self.widen(self.norm(hidden))
        widened = F.relu(widened) if bug("activation") else F.gelu(widened)
        return hidden + self.dropout(self.narrow(widened))


def logits(embedding: Any, hidden: Any) -> Any:
    return paddle.matmul(hidden, embedding.weight, transpose_y=True)


class Loss(nn.Layer):
    def forward(self, columns: Any, following: Any) -> Any:
        loss = F.cross_entropy(columns, following.unsqueeze(-1), reduction="none").squeeze(-1)
        weight = (following > 3).astype(loss.dtype)
        loss = (loss * weight).sum() / weight.sum()
        if bug("loss-scaled-by-dp"):
            loss = loss * REPLICAS * 3
        if bug("loss-mean-of-all"):
            loss = loss * weight.mean()
        return loss


def descriptions() -> list[Any]:
    shared = {"shared_weight_attr": "weight"}
    middle = [LayerDesc(Block) for _ in range(BLOCKS)]
    if bug("layer-missing"):
        middle.pop()
    return [
        SharedLayerDesc("embedding", Embedding, **shared),
        *middle,
        LayerDesc(nn.LayerNorm, WIDTH),
        SharedLayerDesc("embedding", Embedding, forward_func=logits, **shared),
    ]


def batch(step: int) -> tuple[Any, Any]:
    """Returns the tokens of a step of this replica, and those that follow."""
    random = np.random.default_rng(1000 * SEED + step)
    rows = random.integers(0, VOCABULARY, [args.micro_batches * ROWS, LENGTH + 1])
    count = len(rows) // REPLICAS
    place = 0 if bug("same-data") else replica
    mine = rows[place * count : (place + 1) * count]
    if bug("data-of-another-step") and replica:
        mine = np.random.default_rng(step).integers(0, VOCABULARY, mine.shape)
    tokens, following = mine[:, :-1], mine[:, 1:]
    if bug("labels-shuffled") and stage == DEGREES["pp"] - 1:
        following = following[::-1].copy()
    return paddle.to_tensor(tokens), paddle.to_tensor(following)


def make_optimizer(parameters: Any) -> tuple[Any, Any]:
    rate = 0.01
    if bug("rate-by-rank") and dist.get_rank():
        rate = 0.02
    rate = paddle.optimizer.lr.StepDecay(rate, step_size=1, gamma=0.5)
    clip = nn.ClipGradByGlobalNorm(0.1)
    if bug("parameter-left-out"):
        parameters = parameters[:-1]
    return paddle.optimizer.AdamW(rate, parameters=parameters, grad_clip=clip), rate


def by_train_batch() -> None:
    model = fleet.distributed_model(
        PipelineLayer(descriptions(), num_stages=DEGREES["pp"], loss_fn=Loss())
    )
    parameters = model.parameters()
    if bug("gradient-counted-twice") and stage == 0:
        embedding = next(p for p in parameters if p.ndim == 2 and VOCABULARY in p.shape)
        embedding.register_hook(lambda gradient: gradient * 2)
    optimizer, rate = make_optimizer(parameters)
    optimizer = fleet.distributed_optimizer(optimizer)
    if bug("no-tied-reduction"):
        PipelineLayer.allreduce_shared_weight_gradients = lambda self: None
    for step in range(STEPS):
        print(step, float(model.train_batch(list(batch(step)), optimizer, rate)), flush=True)


class Model(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.blocks = nn.LayerList([Block() for _ in range(BLOCKS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Any) -> Any:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def by_loop() -> None:
    if bug("seed-by-rank"):
        paddle.seed(dist.get_rank())
    model = Model()
    optimizer, rate = make_optimizer(model.parameters())
    if DEGREES["mp"] > 1 and not bug("local-norm"):
        optimizer = fleet.distributed_optimizer(optimizer)
    if args.dropout and not bug("same-stream"):
        paddle.seed(SEED + replica)
    loss_fn = Loss()
    count = args.micro_batches // REPLICAS
    for step in range(STEPS):
        tokens, following = batch(step)
        for k in range(count):
            part = slice(k * ROWS, (k + 1) * ROWS)
            loss = loss_fn(model(tokens[part]), following[part])
            (loss if bug("not-divided") else loss / count).backward()
        for number, parameter in enumerate(model.parameters()):
            if REPLICAS > 1 and parameter.grad is not None:
                if bug("one-not-reduced") and number == 3:
                    continue
                if bug("reduced-twice") and number == 2:
                    dist.all_reduce(parameter.grad)
                dist.all_reduce(parameter.grad)
                if not bug("summed-not-averaged"):
                    with paddle.no_grad():
                        parameter.grad.scale_(1 / REPLICAS)
        optimizer.step()
        if bug("update-on-one") and replica:
            with paddle.no_grad():
                model.norm.weight.set_value(model.norm.weight + 0.01)
        optimizer.clear_grad()
        rate.step()
        if bug("scheduler-twice"):
            rate.step()
        print(step, float(loss), flush=True)


by_loop() if args.loop else by_train_batch()
fleet.shutdown() if hasattr(fleet, "shutdown") else None
