"""Random right programs, for none of which ``locate`` may name a place.

    python -m tests.contrib.locator.right_programs FIRST COUNT

All jobs run one after another in the same ranks, two or four, and all twins in this process: a
program takes a second or two, not the ten of a ``fleetpipe locate``. Guards verify each step too.
"""

from __future__ import annotations

import random
import sys
import tempfile
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
from tests import byhand, pipelines
from tests.contrib.locator import right_layers

STEPS, VOCABULARY, LENGTH = 3, 19, 6
#: What is split in two: along one axis, or along two.
AXES = (
    *(["pp"], ["dp"], ["mp"], ["sharding"]) * 3,
    *(["pp", "dp"], ["pp", "mp"], ["dp", "mp"], ["pp", "sharding"], ["dp", "sharding"]),
)
#: Of the programs from number 1000 on, whose sequences or experts are spread.
SPREADING = (
    *(["sep"], ["cp"], ["mp"], ["sharding", "ep"], ["dp", "ep"], ["mp", "ep"]),
    *(["pp", "sep"], ["pp", "cp"], ["dp", "sep"], ["dp", "cp"], ["sharding", "sep"]),
    *(["sep", "cp"], ["mp", "sep"], ["mp", "cp"], ["pp", "mp"], ["dp", "mp"], ["sep", "ep"]),
    *(["pp", "sharding", "ep"], ["pp", "dp", "ep"], ["pp", "mp", "ep"]),
)
TWO_CHUNKS = ("Interleaved1F1B", "ZBV", "VHalf")


class Program(NamedTuple):
    """A training of two or four ranks.

    Attributes:
        axes: Those that are split in two.
        loop: Whether it is a loop of its own, without ``train_batch``.
        wrapped: Whether replicas of such a loop leave their sums to Fleet.
        micro_batches: Of each replica.
        scheduled: Whether a scheduler changes the learning rate.
        evaluates: Whether it evaluates between steps.
        freezes: Whether the embedding is not trained.
        attends: Whether blocks have attention, and tokens positions.
        in_parts: Whether members along mp have parts of sequences between products.
        mixture: The kind of experts, "" for none.
        reduction: Of the loss: fleetpipe's own option.
        recomputes: Whether layers are computed again in backward.
        guards: fleetpipe's own option: of how many steps one is verified.
    """

    number: int
    axes: list[str]
    loop: bool
    wrapped: bool
    schedule: str
    blocks: int
    width: int
    norm: str
    activation: str
    dropout: float
    tied: bool
    micro_batches: int
    rows: int
    optimizer: str
    clip: float
    scheduled: bool
    decay: float
    evaluates: bool
    freezes: bool
    attends: bool = False
    in_parts: bool = False
    mixture: str = ""
    reduction: str = "mean"
    recomputes: bool = False
    guards: int = 1

    @property
    def ranks(self) -> int:
        """How many it runs on."""
        return 1 << sum(axis != "ep" for axis in self.axes)

    @property
    def length(self) -> int:
        """Places of a sequence."""
        return right_layers.PLACES if self.attends else LENGTH


def drawn(number: int) -> Program:
    """Returns the program of a number."""
    draw = random.Random(number)
    axes = draw.choice(AXES if number < 1000 else SPREADING)
    loop = "pp" not in axes and draw.random() < 0.6
    names = ("1F1B", "FThenB", "ZBH1", "ZBH2", "Eager1F1B", *TWO_CHUNKS)
    program = Program(
        number,
        axes,
        loop,
        axes != ["dp"] or draw.random() < 0.5,
        draw.choice(names) if "pp" in axes else "1F1B",
        draw.choice([2, 3, 5]),
        draw.choice([4, 8, 12]),
        draw.choice(["LayerNorm", "Identity"] + ["BatchNorm1D"] * (not loop)),
        draw.choice(["gelu", "relu", "silu", "tanh"]),
        draw.choice([0.0, 0.0, 0.3]),
        not loop and draw.random() < 0.5,
        draw.choice([2, 4] if "pp" in axes else [1, 2, 4]),
        draw.choice([1, 2, 3]),
        draw.choice(["SGD", "Momentum", "Adam", "AdamW", "RMSProp"]),
        draw.choice([0.0, 0.05, 100.0]),
        draw.random() < 0.3,
        draw.choice([0.0, 0.1]),
        draw.random() < 0.3,
        draw.random() < 0.2,
    )
    return program if number < 1000 else _spread(program, draw)


def _spread(program: Program, draw: random.Random) -> Program:
    axes = program.axes
    split = not {"sep", "cp"}.isdisjoint(axes)
    mixture = draw.choice(["routed", "stock"]) if "ep" in axes else ""
    if mixture and "mp" in axes:
        # Members send the same tokens: Paddle's experts take them as more, and round otherwise.
        mixture = "routed"
    # Loops of their own: along one axis, without experts, with losses of as many tokens.
    loop = program.loop and not mixture and len(axes) == 1
    return program._replace(
        loop=loop,
        wrapped=not split,
        norm="LayerNorm",
        attends=True,
        in_parts="mp" in axes and not mixture and draw.random() < (0.5 if split else 1),
        mixture=mixture,
        reduction="mean" if loop else draw.choice(["mean", "mean", "tokens"]),
        recomputes=draw.random() < 0.25,
    )


class Block(nn.Layer):
    """A norm, two products, which mp splits, a dropout, and the way around them."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        width = program.width
        named = {"data_format": "NLC"} if program.norm == "BatchNorm1D" else {}
        self.norm = getattr(nn, program.norm)(width, **named)
        self.up: Any = nn.Linear(width, 2 * width)
        self.down: Any = nn.Linear(2 * width, width)
        if "mp" in program.axes:
            self.up = ColumnParallelLinear(width, 2 * width, has_bias=True, gather_output=False)
            self.down = RowParallelLinear(2 * width, width, has_bias=True, input_is_parallel=True)
        self.activation = getattr(nn.functional, program.activation)
        self.dropout = nn.Dropout(program.dropout)

    def forward(self, x: Any) -> Any:
        return x + self.dropout(self.down(self.activation(self.up(self.norm(x)))))


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
    if program.mixture:
        return AuxiliaryLoss(Loss(), 0.1)
    return nn.CrossEntropyLoss(ignore_index=0) if program.reduction == "tokens" else Loss()


def descriptions(program: Program) -> list[Any]:
    """Returns the list of layers."""
    middle = [LayerDesc(Block, program) for _ in range(program.blocks)]
    sizes = VOCABULARY, program.width
    if program.attends:
        block, first = right_layers.Block, (right_layers.Embedding, program, VOCABULARY)
        middle = [LayerDesc(block, program) for _ in range(program.blocks)]
        middle.append(LayerDesc(right_layers.Gathered, program))
        if not program.tied:
            return [LayerDesc(*first), *middle, LayerDesc(nn.Linear, *sizes[::-1])]
        kind, *rest = first
        return [
            SharedLayerDesc("table", kind, None, "weight", *rest),
            *middle,
            SharedLayerDesc("table", kind, logits, "weight", *rest),
        ]
    if not program.tied:
        return [LayerDesc(nn.Embedding, *sizes), *middle, LayerDesc(nn.Linear, *sizes[::-1])]
    return [
        SharedLayerDesc("table", nn.Embedding, None, "weight", *sizes),
        *middle,
        SharedLayerDesc("table", nn.Embedding, logits, "weight", *sizes),
    ]


def optimizer_of(program: Program, parameters: list[Any]) -> tuple[Any, Any]:
    """Returns an optimizer, and its scheduler or None."""
    rate: Any = 0.02
    if program.scheduled:
        rate = paddle.optimizer.lr.StepDecay(0.02, step_size=1, gamma=0.5)
    clip = nn.ClipGradByGlobalNorm(program.clip) if program.clip else None
    for parameter in parameters:
        if program.freezes and not program.tied and parameter.shape == [VOCABULARY, program.width]:
            parameter.stop_gradient = True
    kind = getattr(paddle.optimizer, program.optimizer)
    made = kind(rate, parameters=parameters, grad_clip=clip, weight_decay=program.decay)
    return made, rate if program.scheduled else None


def batch(program: Program, step: int) -> list[Any]:
    """Returns this rank's samples, or all of them on one device."""
    count = program.micro_batches * program.rows
    total = count * 2 ** len({"dp", "sharding"}.intersection(program.axes))
    draw = np.random.default_rng([program.number, step])
    tokens = draw.integers(0, VOCABULARY, [total, program.length + 1])
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
    own: dict[str, Any] = {"guards": program.guards, "loss_reduction": program.reduction}
    strategy = pipelines.strategy(
        *(program.micro_batches, program.schedule),
        **{"rows": program.rows, "own": own, **dict.fromkeys(program.axes, 2)},
    )
    fleet.init(is_collective=True, strategy=strategy)
    try:
        paddle.seed(program.number)
        tracker = right_layers.tracker_of()
        tracker.reset()
        tracker.add("local_seed", 5000 + program.number + paddle.distributed.get_rank())
        with suppress(Finished):
            _by_loop(program) if program.loop else _by_train_batch(program)
    finally:
        fleet.shutdown()


def _by_train_batch(program: Program) -> None:
    chunks = {"num_virtual_pipeline_stages": 2} if program.schedule in TWO_CHUNKS else {}
    degree = 2 if "pp" in program.axes else 1
    more: dict[str, Any] = {"loss_fn": loss_of(program), **chunks}
    if program.recomputes:
        topology: Any = fleet.get_hybrid_communicate_group()
        more["recompute_ctx"] = {"mp_group": topology.get_model_parallel_group()}
        more["recompute_interval"] = 1
    layers = PipelineLayer(descriptions(program), num_stages=degree, **more)
    model = fleet.distributed_model(layers)
    plain, scheduler = optimizer_of(program, model.parameters())
    optimizer = fleet.distributed_optimizer(plain)
    for step in range(STEPS):
        if program.evaluates:
            model.eval_batch(batch(program, step + 1), compute_loss=True)
        model.train_batch(batch(program, step), optimizer, scheduler)


def _by_loop(program: Program) -> None:
    layers = [description.build_layer() for description in descriptions(program)]
    model: Any = nn.Sequential(*layers)
    topology: Any = fleet.get_hybrid_communicate_group()
    copies = sequences.sequence_ranks().ranks * topology.get_data_parallel_world_size()
    members = topology.get_model_parallel_world_size()
    if program.in_parts and members > 1:
        register = right_layers.parts.register_sequence_parallel_allreduce_hooks
        register(model, program.micro_batches, False)
    optimizer, scheduler = optimizer_of(program, model.parameters())
    if program.wrapped:
        model, optimizer = fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)
    loss_fn = loss_of(program)
    # Ranks with other values have dropouts of their own; along mp values may be the same.
    apart = members == 1 or program.in_parts
    place = paddle.distributed.get_rank() if apart else _replica()
    paddle.seed(1000 + program.number + place)
    for step in range(STEPS):
        tokens, labels = batch(program, step)
        if program.evaluates:
            model.eval()
            with paddle.no_grad():
                loss_fn(model(tokens), labels)
            model.train()
        rows = len(labels) // program.micro_batches
        for number in range(program.micro_batches):
            part = slice(number * rows, (number + 1) * rows)
            inputs = tuple(t[part] for t in tokens) if program.attends else tokens[part]
            loss = loss_fn(model(inputs), labels[part]) / program.micro_batches
            loss.backward()
        trained = [parameter for parameter in model.parameters() if not parameter.stop_gradient]
        for parameter in trained if copies > 1 and not program.wrapped else ():
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


def recorded(program: Program, folder: Path, rank: int, feed: Feed | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        if feed is not None:
            stack.enter_context(degrees_of_one(feed.replicas))
        stack.enter_context(collecting(Recorder(folder, STEPS, rank), feed))
        train(program)


def run_jobs(folder: str, numbers: list[int]) -> None:
    """What each of the ranks does."""
    for number in numbers:
        rank = paddle.distributed.get_rank()
        recorded(drawn(number), Path(folder, str(number), "job"), rank)


def named(program: Program, home: Path) -> Location | None:
    """Runs the twin of a job that has run, and returns the place that is named."""
    recorded(program, home / "twin", 0, Feed(home / "job", perturbed=False))
    job, twin = record.read(home / "job"), record.read(home / "twin")
    assert job.steps == twin.steps == STEPS, (job.steps, twin.steps)
    if first_difference(job, twin) is None:
        return None
    recorded(program, home / "moved", 0, Feed(home / "job", perturbed=True))
    return first_difference(job, twin, record.read(home / "moved"))


def alarms(numbers: list[int]) -> list[int]:
    """Returns the numbers of the programs for which a place is named."""
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (2, 4):
            chosen = [number for number in numbers if drawn(number).ranks == ranks]
            if chosen:
                byhand.call(*(run_jobs, ranks, folder, chosen), folder=Path(folder), timeout=3600.0)
        for number in numbers:
            place = named(drawn(number), Path(folder, str(number)))
            if place is not None:
                wrong.append(number)
                print(f"{drawn(number)}\n{place}", flush=True)
    return wrong


if __name__ == "__main__":
    # Ranks import what they call from here.
    from tests.contrib.locator.right_programs import alarms as by_name

    first, count = map(int, sys.argv[1:])
    false = by_name([*range(first, first + count)])
    print(f"{len(false)} of {count} right programs are named: {false}")
    sys.exit(bool(false))
