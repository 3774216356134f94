"""Right programs on two ranks, into which ``seeded.py`` puts bugs, and their twins in this process.

A program takes a second or two, not the ten of a ``fleetpipe locate``.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import nn

from fleetpipe import fleet
from fleetpipe.contrib.experts import AuxiliaryLoss
from fleetpipe.contrib.locator import Location, record
from fleetpipe.contrib.locator.collecting import collecting
from fleetpipe.contrib.locator.locate_command import first_difference
from fleetpipe.contrib.locator.recorder import Finished, Recorder
from fleetpipe.contrib.locator.twin import Feed, degrees_of_one
from fleetpipe.dygraph import sequences
from fleetpipe.fleet.meta_parallel import (
    ColumnParallelLinear,
    LayerDesc,
    PipelineLayer,
    RowParallelLinear,
    SharedLayerDesc,
)
from tests import pipelines
from tests.contrib.locator import right_layers

STEPS, VOCABULARY, LENGTH, WIDTH, BLOCKS = 3, 19, 6, 8, 3
#: Of each replica, and their rows.
MICRO_BATCHES, ROWS = 2, 2


class Program(NamedTuple):
    """A training of two ranks.

    Attributes:
        axes: Those that are split in two.
        loop: Whether it is a loop of its own, without ``train_batch``.
        wrapped: Whether replicas of such a loop leave their sums to Fleet.
        scheduled: Whether a scheduler changes the learning rate.
        attends: Whether blocks have attention, and tokens positions.
        in_parts: Whether members along mp have parts of sequences between products.
        mixture: Whether blocks have experts.
    """

    axes: list[str]
    loop: bool = False
    wrapped: bool = True
    norm: str = "LayerNorm"
    dropout: float = 0.0
    tied: bool = False
    optimizer: str = "AdamW"
    clip: float = 0.05
    scheduled: bool = False
    attends: bool = False
    in_parts: bool = False
    mixture: bool = False

    @property
    def length(self) -> int:
        """Places of a sequence."""
        return right_layers.PLACES if self.attends else LENGTH


class Block(nn.Layer):
    """A norm, two products, which mp splits, a dropout, and the way around them."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        width = WIDTH
        named = {"data_format": "NLC"} if program.norm == "BatchNorm1D" else {}
        self.norm = getattr(nn, program.norm)(width, **named)
        self.up: Any = nn.Linear(width, 2 * width)
        self.down: Any = nn.Linear(2 * width, width)
        if "mp" in program.axes:
            self.up = ColumnParallelLinear(width, 2 * width, has_bias=True, gather_output=False)
            self.down = RowParallelLinear(2 * width, width, has_bias=True, input_is_parallel=True)
        self.dropout = nn.Dropout(program.dropout)

    def forward(self, x: Any) -> Any:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


def logits(table: Any, hidden: Any) -> Any:
    return paddle.matmul(hidden, table.weight, transpose_y=True)


class Loss(nn.Layer):
    """The mean over all tokens of a micro-batch."""

    @staticmethod
    def counted(labels: Any) -> int:
        return int(labels.size)

    def forward(self, output: Any, labels: Any) -> Any:
        return nn.functional.cross_entropy(output, labels.unsqueeze(-1))


def loss_of(program: Program) -> Any:
    """Returns the loss function."""
    return AuxiliaryLoss(Loss(), 0.1) if program.mixture else Loss()


def descriptions(program: Program) -> list[Any]:
    """Returns the list of layers."""
    middle = [LayerDesc(Block, program) for _ in range(BLOCKS)]
    first: list[Any] = [nn.Embedding, VOCABULARY, WIDTH]
    if program.attends:
        first = [right_layers.Embedding, program, VOCABULARY]
        middle = [LayerDesc(right_layers.Block, program) for _ in range(BLOCKS)]
        middle.append(LayerDesc(right_layers.Gathered, program))
    if not program.tied:
        return [LayerDesc(*first), *middle, LayerDesc(nn.Linear, WIDTH, VOCABULARY)]
    kind, *rest = first
    return [
        SharedLayerDesc("table", kind, None, "weight", *rest),
        *middle,
        SharedLayerDesc("table", kind, logits, "weight", *rest),
    ]


def optimizer_of(program: Program, parameters: list[Any]) -> tuple[Any, Any]:
    """Returns an optimizer, and its scheduler or None."""
    rate: Any = 0.02
    if program.scheduled:
        rate = paddle.optimizer.lr.StepDecay(0.02, step_size=1, gamma=0.5)
    clip = nn.ClipGradByGlobalNorm(program.clip) if program.clip else None
    kind = getattr(paddle.optimizer, program.optimizer)
    made = kind(rate, parameters=parameters, grad_clip=clip, weight_decay=0.1)
    return made, rate if program.scheduled else None


def batch(program: Program, step: int) -> list[Any]:
    """Returns this rank's samples, or all of them on one device."""
    total = MICRO_BATCHES * ROWS * 2 ** len({"dp", "sharding"}.intersection(program.axes))
    tokens = np.random.default_rng(step).integers(0, VOCABULARY, [total, program.length + 1])
    topology = fleet.get_hybrid_communicate_group()
    replicas = topology.get_data_parallel_world_size() * topology.get_sharding_parallel_world_size()
    part = np.split(tokens, replicas)[_replica()]
    ids, following = (paddle.to_tensor(t.copy()) for t in (part[:, :-1], part[:, 1:]))
    if not program.attends:
        return [ids, following]
    places = paddle.arange(program.length).expand(ids.shape)
    return list(sequences.own_part([(ids, places), following]))


def _replica() -> int:
    topology = fleet.get_hybrid_communicate_group()
    sharding: int = topology.get_sharding_parallel_world_size()
    return topology.get_data_parallel_rank() * sharding + topology.get_sharding_parallel_rank()


def train(program: Program) -> None:
    """Trains a program as its user would."""
    degrees: dict[str, Any] = dict.fromkeys(program.axes, 2)
    with pipelines.begun(pipelines.strategy(MICRO_BATCHES, rows=ROWS, **degrees)):
        paddle.seed(7)
        tracker = right_layers.tracker_of()
        tracker.reset()
        tracker.add("local_seed", 5000 + paddle.distributed.get_rank())
        with suppress(Finished):
            _by_loop(program) if program.loop else _by_train_batch(program)


def _by_train_batch(program: Program) -> None:
    stages = 2 if "pp" in program.axes else 1
    layers = PipelineLayer(descriptions(program), num_stages=stages, loss_fn=loss_of(program))
    model = fleet.distributed_model(layers)
    plain, scheduler = optimizer_of(program, model.parameters())
    optimizer = fleet.distributed_optimizer(plain)
    for step in range(STEPS):
        model.train_batch(batch(program, step), optimizer, scheduler)


def _by_loop(program: Program) -> None:
    model: Any = nn.Sequential(*(layer.build_layer() for layer in descriptions(program)))
    topology: Any = fleet.get_hybrid_communicate_group()
    copies = topology.get_data_parallel_world_size()
    members = topology.get_model_parallel_world_size()
    optimizer, scheduler = optimizer_of(program, model.parameters())
    if program.wrapped:
        model, optimizer = fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)
    # Replicas have dropouts of their own; along mp values are the same.
    paddle.seed(1000 + (_replica() if members > 1 else paddle.distributed.get_rank()))
    for step in range(STEPS):
        for tokens, labels in zip(*(part.split(MICRO_BATCHES) for part in batch(program, step))):
            (Loss()(model(tokens), labels) / MICRO_BATCHES).backward()
        for parameter in model.parameters() if copies > 1 and not program.wrapped else ():
            average(parameter.grad, copies)
        optimizer.step()
        optimizer.clear_grad()
        if scheduler is not None:
            scheduler.step()


def average(gradient: Any, copies: int, **options: Any) -> None:
    """Adds a gradient up over all copies, as a loop of a user's own does."""
    paddle.distributed.all_reduce(gradient, **options)
    with paddle.no_grad():
        gradient.scale_(1 / copies)


def recorded(program: Program, folder: Path, rank: int, feed: Feed | None = None) -> record.Record:
    """Trains a program, as a job or as a twin that a feed is for, and returns what is recorded."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        if feed is not None:
            stack.enter_context(degrees_of_one(feed.replicas))
        stack.enter_context(collecting(Recorder(folder, STEPS, rank), feed))
        train(program)
    return record.read(folder)


def named(program: Program, home: Path) -> Location | None:
    """Runs the twin of a job that has run, and returns the place that is named."""
    job = record.read(home / "job")
    twin = recorded(program, home / "twin", 0, Feed(home / "job", perturbed=False))
    assert job.steps == twin.steps == STEPS, (job.steps, twin.steps)
    if first_difference(job, twin) is None:
        return None
    moved = recorded(program, home / "moved", 0, Feed(home / "job", perturbed=True))
    return first_difference(job, twin, moved)
