"""A user's own loops: convolutions (dp), or tensor-parallel layers (mp); ``--bug NAME``."""

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
    ParallelCrossEntropy,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from paddle.distributed.fleet.utils import sequence_parallel_utils as parts
from paddle.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--bug", default="")
parser.add_argument("--net", default="images", choices=["images", "attention", "sequence"])
parser.add_argument("--optimizer", default="Momentum")
parser.add_argument("--wrapped", action="store_true")
parser.add_argument("--micro-batches", type=int, default=4, help="of all replicas")
args = parser.parse_args()

DEGREES = dict.fromkeys(("dp", "mp", "sharding"), 1)
DEGREES.update(
    {axis: int(n) for axis, n in re.findall(r"([a-z]+)(\d+)", os.environ.get("DEGREES", ""))}
)
MANY = any(n > 1 for n in DEGREES.values())
REPLICAS = DEGREES["dp"] * DEGREES["sharding"]
COUNT = args.micro_batches // REPLICAS
ROWS, WIDTH, CLASSES, LENGTH, HEADS = 4, 8, 10, 8, 4


def bug(name: str) -> bool:
    return args.bug == name and MANY


strategy = fleet.DistributedStrategy()
strategy.hybrid_configs = {f"{axis}_degree": n for axis, n in DEGREES.items()}
fleet.init(is_collective=True, strategy=strategy)
hcg = fleet.get_hybrid_communicate_group()
rank = dist.get_rank()
replica = hcg.get_data_parallel_rank() * DEGREES["sharding"] + hcg.get_sharding_parallel_rank()
shard, mp_group = hcg.get_model_parallel_rank(), hcg.get_model_parallel_group()
paddle.seed(101)


class Images(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2D(3, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm2D(WIDTH, momentum=0.5 if bug("statistics-momentum") else 0.9)
        self.deep = nn.Conv2D(WIDTH, WIDTH, 3, padding=1, groups=2)
        if bug("head-after-draws") and rank:
            paddle.randn([3])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Any) -> Any:
        if bug("statistics-frozen") and rank:
            self.norm.eval()
        hidden = F.relu(self.norm(self.stem(images)))
        hidden = hidden + self.deep(hidden)
        return self.head(hidden.mean([2, 3]))

    @staticmethod
    def batch(random: Any, rows: int) -> tuple[Any, Any]:
        return random.standard_normal([rows, 3, 6, 6]).astype("float32"), random.integers(
            0, CLASSES, [rows]
        )


class Vocabulary(VocabParallelEmbedding):
    def forward(self, tokens: Any) -> Any:
        if bug("table-not-reduced"):
            count = self.weight.shape[0]
            local = tokens - shard * count
            inside = paddle.logical_and(local >= 0, local < count)
            found = F.embedding(paddle.where(inside, local, paddle.zeros_like(local)), self.weight)
            return found * inside.unsqueeze(-1).astype(found.dtype)
        return super().forward(tokens)


class Attention(nn.Layer):
    """Heads shared out over mp, and a classifier of parts of the classes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Vocabulary(16, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (
            ColumnParallelLinear(WIDTH, 2 * WIDTH, has_bias=True, gather_output=False)
            for _ in range(3)
        )
        self.out = RowParallelLinear(2 * WIDTH, WIDTH, has_bias=True, input_is_parallel=True)
        if bug("norm-by-shard") and shard:
            self.norm.weight.set_value(self.norm.weight * 1.5)
        self.head = ColumnParallelLinear(WIDTH, CLASSES, has_bias=True, gather_output=False)

    def forward(self, tokens: Any) -> Any:
        hidden = self.table(tokens)
        normed = self.norm(hidden)
        rows, length, _ = tokens.shape[0], tokens.shape[1], None
        heads = HEADS // DEGREES["mp"]
        q, k, v = (
            layer(normed).reshape([rows, length, heads, -1]).transpose([0, 2, 1, 3])
            for layer in (self.q, self.k, self.v)
        )
        size = q.shape[-1] * (DEGREES["mp"] if bug("scaled-by-part") else 1)
        seen = F.softmax(paddle.matmul(q, k, transpose_y=True) / size**0.5)
        seen = paddle.matmul(seen, v).transpose([0, 2, 1, 3]).reshape([rows, length, -1])
        if bug("dropout-of-parts"):
            seen = F.dropout(seen, 0.3)
        hidden = hidden + self.out(seen)
        return self.head(hidden.mean(1))

    @staticmethod
    def batch(random: Any, rows: int) -> tuple[Any, Any]:
        return random.integers(0, 16, [rows, LENGTH]), random.integers(0, CLASSES, [rows])


class Sequence(nn.Layer):
    """Norms on parts of the sequence between tensor-parallel layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = VocabParallelEmbedding(16, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = parts.ColumnSequenceParallelLinear(
            WIDTH, 4 * WIDTH, has_bias=True, gather_output=False
        )
        self.down = parts.RowSequenceParallelLinear(
            4 * WIDTH, WIDTH, has_bias=True, input_is_parallel=True
        )
        self.last = nn.LayerNorm(WIDTH)
        for layer in (self.norm, self.last):
            if bug("norm-of-parts") and layer is self.norm:
                continue
            for parameter in layer.parameters():
                parts.mark_as_sequence_parallel_parameter(parameter)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Any) -> Any:
        hidden = self.table(tokens).transpose([1, 0, 2])
        if bug("slice-for-scatter"):
            hidden = hidden.split(2)[shard]
        else:
            hidden = parts.ScatterOp.apply(hidden)
        hidden = hidden + self.down(F.gelu(self.up(self.norm(hidden))))
        hidden = self.last(hidden)
        if bug("gathered-as-sum"):
            hidden = parts.AllGatherOp.apply(hidden)
        else:
            hidden = parts.GatherOp.apply(hidden)
        return self.head(hidden.mean(0))

    batch = Attention.batch


net = {"images": Images, "attention": Attention, "sequence": Sequence}[args.net]()
if args.bug == "shards-swapped":
    # A file of one device, of which each rank takes its columns.
    columns = np.random.default_rng(5).random([WIDTH, 2 * WIDTH], "float32")
    place = DEGREES["mp"] - 1 - shard
    net.q.weight.set_value(np.split(columns, DEGREES["mp"], 1)[place])
if bug("evaluating-on-one") and rank:
    net.eval()
if args.net == "sequence" and DEGREES["mp"] > 1:
    parts.register_sequence_parallel_allreduce_hooks(net, COUNT, False)
model = fleet.distributed_model(net) if args.wrapped else net
parallel_loss = ParallelCrossEntropy() if args.net == "attention" else None


class Loss(nn.Layer):
    def forward(self, columns: Any, labels: Any) -> Any:
        if parallel_loss is not None and bug("loss-of-part"):
            here = labels % columns.shape[-1]
            return F.cross_entropy(columns, here)
        if parallel_loss is not None:
            return parallel_loss(columns, labels.unsqueeze(-1)).mean()
        return F.cross_entropy(columns, labels)


loss_fn = Loss()
named = [(name, p) for name, p in net.named_parameters() if not p.stop_gradient]
trained = [p for _, p in named]
more = {}
if args.optimizer in ("Momentum", "AdamW"):
    more["weight_decay"] = 0.0 if bug("decay-on-one") and rank else 0.1
if args.optimizer == "Momentum":
    more["momentum"] = 0.5 if bug("momentum-on-one") and rank else 0.9
rate = paddle.optimizer.lr.CosineAnnealingDecay(0.05, T_max=10)
clip = None if bug("no-clip") and rank else nn.ClipGradByGlobalNorm(0.2)
optimizer = getattr(paddle.optimizer, args.optimizer)(
    rate, parameters=trained, grad_clip=None if args.optimizer == "SGD" else clip, **more
)
if args.wrapped or DEGREES["mp"] > 1:
    optimizer = fleet.distributed_optimizer(optimizer)


def data(step: int) -> tuple[Any, Any]:
    random = np.random.default_rng(9 + step)
    rows = ROWS * args.micro_batches
    values, labels = type(net).batch(random, rows)
    count = rows // REPLICAS
    start, end = replica * count, (replica + 1) * count
    if bug("overlapping-slices") and replica:
        start, end = start - 1, end - 1
    if bug("unequal-rows"):
        cut = count + 2
        start, end = (0, cut) if replica == 0 else (cut, rows)
    values, labels = values[start:end], labels[start:end]
    if bug("labels-of-another") and replica:
        labels = labels[::-1].copy()
    return paddle.to_tensor(values), paddle.to_tensor(labels)


def reduced(parameter: Any) -> None:
    group = None if bug("world-for-dp") else hcg.get_data_parallel_group()
    dist.all_reduce(parameter.grad, group=group)
    with paddle.no_grad():
        parameter.grad.scale_(1 / REPLICAS)


for step in range(4):
    values, labels = data(step)
    rows = len(values) // COUNT
    for number in range(COUNT):
        part = slice(number * rows, (number + 1) * rows)
        loss = loss_fn(model(values[part]), labels[part])
        scaled = loss / COUNT
        if bug("divided-twice"):
            scaled = scaled / COUNT
        if bug("last-overwrites") and number == COUNT - 1:
            optimizer.clear_grad()
        scaled.backward()
        if bug("reduced-too-early") and number == 0:
            for parameter in trained:
                reduced(parameter)
    if REPLICAS > 1 and not args.wrapped and not bug("reduced-too-early"):
        for name, parameter in named:
            if bug("clipped-before"):
                nn.utils.clip_grad_norm_([parameter], 0.01)
            if bug("largest-of-ranks") and name == "deep.weight":
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.MAX)
                continue
            if bug("half-precision-sum") and name == "stem.weight":
                halved = parameter.grad.astype("bfloat16").astype("float32")
                parameter.grad.set_value(halved)
            if bug("biases-left-out") and parameter.ndim == 1:
                continue
            reduced(parameter)
    optimizer.step()
    if bug("state-lost-on-one") and rank and step == 1:
        for moment in optimizer._accumulators["moment1"].values():
            moment.set_value(moment * 0)
    if bug("stale-broadcast") and step == 1:
        dist.broadcast(net.head.weight, src=0)
        if rank:
            net.head.bias.set_value(net.head.bias * 0.9)
    if not (bug("not-cleared") and rank):
        optimizer.clear_grad()
    rate.step()
    if bug("rate-after-skip") and rank and step == 1:
        rate.step()
    print(step, float(loss), flush=True)
if hasattr(fleet, "shutdown"):
    fleet.shutdown()
