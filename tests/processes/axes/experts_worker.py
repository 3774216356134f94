"""What a rank of a job with experts finds: beside the single model, and in checkpoints."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.incubate.distributed.models.moe import MoELayer
from paddle.nn import functional

import fleetpipe
from fleetpipe import fleet, parity
from fleetpipe.dygraph.experts import AuxiliaryLoss, Experts
from fleetpipe.errors import FleetPipeError
from fleetpipe.fleet.meta_parallel import LayerDesc
from fleetpipe.job.job import current_job
from fleetpipe.mesh.groups import DirectGroup
from tests import jobs
from tests.pipelines import ROWS, pipeline

WIDTH, LENGTH, EXPERTS = 8, 5, 4


class Routed(nn.Layer):
    """Two of four experts for each token, one of which gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.mixture = Experts(self.expert, EXPERTS)
        self.loss: Any = None

    @staticmethod
    def expert() -> nn.Layer:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Any) -> Any:
        tokens = self.norm(x).reshape([-1, WIDTH])
        scores = functional.softmax(self.gate(tokens) + paddle.to_tensor([0.0, 0.0, -1e9, 0.0]))
        weights, choices = paddle.topk(scores, 2)
        self.loss = (scores.mean(axis=0) ** 2).sum()
        return x + self.mixture(tokens, choices, weights).reshape(x.shape)

    def get_loss(self) -> Any:
        loss, self.loss = self.loss, None
        return loss


class Stock(nn.Layer):
    """Paddle's own layer: each rank builds its experts, and counts them from 0."""

    def __init__(self) -> None:
        super().__init__()
        hcg = fleet.get_hybrid_communicate_group()
        here = EXPERTS // hcg.get_expert_parallel_world_size()
        experts = nn.LayerList([Routed.expert() for _ in range(here)])
        options = {"moe_group": hcg.get_expert_parallel_group()}
        self.norm = nn.LayerNorm(WIDTH)
        self.moe = MoELayer(WIDTH, experts, {"type": "naive", "top_k": 2}, **options)

    def forward(self, x: Any) -> Any:
        return x + self.moe(self.norm(x))


class OnData(Stock):
    """On inputs that need no gradient; all tokens go to the experts of the first rank."""

    def __init__(self) -> None:
        super().__init__()
        self.moe.gate.gate.bias.set_value(paddle.to_tensor([9.0, 9.0, -9.0, -9.0]))

    def forward(self, x: Any) -> Any:
        return self.moe(self.norm(x).detach())


@contextmanager
def job(micro_batches: int, schedule: str = "1F1B", **degrees: Any) -> Iterator[Any]:
    fleet.init(is_collective=True, strategy=jobs.strategy(micro_batches, schedule, **degrees))
    try:
        yield current_job()
    finally:
        fleet.shutdown()


def built(block: type[nn.Layer] = Routed) -> tuple[Any, Any]:
    """A pipeline with a mixture in each half, and an optimizer with a clip and a state."""
    layers = [LayerDesc(nn.Linear, WIDTH, WIDTH), *[LayerDesc(block)] * 3]
    pipe = pipeline(layers, loss_fn=AuxiliaryLoss(nn.MSELoss(), 0.1))
    clip = nn.ClipGradByGlobalNorm(0.1)
    adam = paddle.optimizer.AdamW(0.01, parameters=pipe.parameters(), grad_clip=clip)
    return pipe, fleet.distributed_optimizer(adam)


def part(running: Any, micro_batches: int, seed: int) -> list[Any]:
    """This replica's part of a batch."""
    numbers = np.random.default_rng(seed)
    rows = micro_batches * ROWS
    shape = (running.degrees.replicas * rows, LENGTH, WIDTH)
    whole = [numbers.standard_normal(shape).astype("float32") for _ in range(2)]
    mine = slice(running.replica * rows, (running.replica + 1) * rows)
    return [paddle.to_tensor(tensor[mine]) for tensor in whole]


def beside_the_single_model(
    block: type[nn.Layer], micro_batches: int, schedule: str, degrees: dict[str, int]
) -> dict[str, Any]:
    with job(micro_batches, schedule, **degrees) as running:
        pipe, optimizer = built(block)
        session = parity.begin(pipe, optimizer)
        for step in range(2):
            session.step(part(running, micro_batches, step))
        states = [n for n in optimizer.state_dict() if "moment1" in n]
        return {
            "verdict": session.report.verdict(),
            "passed": session.report.passed,
            "names": [name for name in pipe.layers.own_state() if "experts" in name],
            "moments": len(states),
        }


def beside_each(runs: list[Any]) -> tuple[list[dict[str, Any]], str]:
    """What each run finds, and what is said of experts that ranks do not divide."""
    return [beside_the_single_model(*run) for run in runs], refused(runs[0][-1])


def through_layouts(folder: Path, layouts: list[tuple[int, dict[str, int]]]) -> list[Any]:
    """Trains a step under each layout from the checkpoint of the one before.

    Returns:
        For each the loss, the state that it begins with, and the one that it ends with.
    """
    legs = []
    for step, (micro_batches, degrees) in enumerate(layouts):
        with job(micro_batches, **degrees) as running:
            pipe, optimizer = built()
            manager = fleetpipe.CheckpointManager(folder)
            if step:
                manager.restore(step=step - 1, model=pipe, optimizer=optimizer)
            begin = numbers_of(pipe.layers.full_state_dict())
            loss = pipe.train_batch(part(running, micro_batches, step), optimizer)
            manager.save(step, model=pipe, optimizer=optimizer)
            manager.wait()
            legs.append((float(loss), begin, numbers_of(pipe.layers.full_state_dict())))
    return legs


def numbers_of(state: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in state.items()}


def one_dies(degrees: dict[str, int]) -> str:
    """The last rank's process ends within its second exchange; returns what the others raise."""
    with job(2, own={"timeout": 20}, **degrees):
        pipe, optimizer = built()
        if fleet.worker_index() == fleet.worker_num() - 1:
            calls = itertools.count()
            exchange = DirectGroup.all_to_all

            def all_to_all(group: Any, parts: Any) -> Any:
                if next(calls) == 4:
                    os._exit(9)
                return exchange(group, parts)

            DirectGroup.all_to_all = all_to_all  # type: ignore[method-assign]
        try:
            pipe.train_batch(part(current_job(), 2, 0), optimizer)
        except FleetPipeError as error:
            return str(error)
    return "nothing"


def without_tokens(degrees: dict[str, int]) -> list[float]:
    """Trains two steps in which the second rank's experts get nothing; returns the losses."""
    with job(1, own={"timeout": 20}, **degrees) as running:
        pipe = pipeline([LayerDesc(OnData)], loss_fn=nn.MSELoss())
        sgd = paddle.optimizer.SGD(0.1, parameters=pipe.parameters())
        optimizer = fleet.distributed_optimizer(sgd)
        data = part(running, 1, 0)
        return [float(pipe.train_batch(data, optimizer)) for _ in range(2)]


def refused(degrees: dict[str, int]) -> str:
    with job(1, **degrees):
        try:
            Experts(Routed.expert, 3)
        except FleetPipeError as error:
            return str(error)
    return "nothing"
