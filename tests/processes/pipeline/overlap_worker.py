"""What a rank finds whose forwards and backwards exchange tokens: bits, times and errors."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional

from fleetpipe import fleet, parity
from fleetpipe.contrib.experts import AuxiliaryLoss, Experts
from fleetpipe.fleet.meta_parallel import LayerDesc, SharedLayerDesc
from fleetpipe.job.job import current_job
from fleetpipe.mesh import turns
from tests import pipelines
from tests.pipelines import ROWS, pipeline
from tests.transport.test_late import DelayedTransport

WIDTH, LENGTH, EXPERTS, MICRO_BATCHES = 8, 5, 4, 4
DEGREES = {"pp": 2, "sharding": 2, "ep": 2}


class Work(paddle.autograd.PyLayer):
    """Takes a while in forward and in backward, and no processor, as a device of its own would."""

    @staticmethod
    def forward(ctx: Any, x: Any, seconds: float) -> Any:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        time.sleep(2 * ctx.seconds)
        return grad.clone()


class Expert(nn.Sequential):
    """Two products, which take ``seconds`` besides."""

    def __init__(self, seconds: float) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.seconds = seconds

    def forward(self, x: Any) -> Any:
        return super().forward(Work.apply(x, self.seconds) if self.seconds else x)


class Block(nn.Layer):
    """A mixture with dropout, and a loss of its own.

    It takes ``seconds`` before the mixture, and its experts as much: a rank runs two of them, each
    on the tokens of two ranks.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.mixture = Experts(lambda: Expert(seconds / 4), EXPERTS)
        self.dropout = nn.Dropout(0.3)
        self.seconds = seconds
        self.loss: Any = None

    def forward(self, x: Any) -> Any:
        tokens = self.dropout(self.norm(x)).reshape([-1, WIDTH])
        if self.seconds:
            tokens = Work.apply(tokens, self.seconds)
        scores = functional.softmax(self.gate(tokens))
        weights, choices = paddle.topk(scores, 2)
        self.loss = (scores.mean(axis=0) ** 2).sum()
        mixed = self.mixture(tokens, choices, weights)
        return x + self.dropout(mixed).reshape(x.shape)

    def get_loss(self) -> Any:
        loss, self.loss = self.loss, None
        return loss


@contextmanager
def job(overlap: bool, seconds: float = 0.0, **own: Any) -> Iterator[Any]:
    own = {"overlap": overlap, **own}
    strategy = pipelines.strategy(MICRO_BATCHES, "DualPipeV", own=own, **DEGREES)
    fleet.init(is_collective=True, strategy=strategy)
    try:
        group: Any = current_job().expert_parallel()
        group.transport = DelayedTransport(group.transport, seconds)
        yield current_job()
    finally:
        fleet.shutdown()


def built(seconds: float = 0.0, recompute_interval: int = 0) -> tuple[Any, Any]:
    """A mixture in each of four stages; the first and the last layer share their weights."""
    ends = [
        SharedLayerDesc("end", nn.Linear, in_features=WIDTH, out_features=WIDTH) for _ in range(2)
    ]
    layers = [ends[0], *[LayerDesc(Block, seconds)] * 4, ends[1]]
    pipe = pipeline(
        layers,
        loss_fn=AuxiliaryLoss(nn.MSELoss(), 0.1),
        recompute_interval=recompute_interval,
        recompute_ctx={},
    )
    adam = paddle.optimizer.AdamW(0.01, parameters=pipe.parameters())
    return pipe, fleet.distributed_optimizer(adam)


def part(running: Any, seed: int) -> list[Any]:
    """This replica's part of a batch."""
    numbers = np.random.default_rng([seed, running.replica])
    shape = (MICRO_BATCHES * ROWS, LENGTH, WIDTH)
    return [paddle.to_tensor(numbers.standard_normal(shape).astype("float32")) for _ in range(2)]


def trained(overlap: bool, rng: str = "keyed", recompute_interval: int = 0) -> dict[str, Any]:
    """Three steps within casts: losses, parameters, how often a turn went over, and parity."""
    handed: list[object] = []
    hand_over = turns._Side.hand_over

    def counted(side: Any) -> None:
        handed.append(side)
        hand_over(side)

    turns._Side.hand_over = counted  # type: ignore[method-assign]
    losses = []
    paddle.seed(1)
    with job(overlap, 0.001 * overlap, rng=rng) as running:
        pipe, optimizer = built(recompute_interval=recompute_interval)
        session = parity.begin(pipe, optimizer) if overlap and rng == "keyed" else None
        for seed in range(3):
            with paddle.amp.auto_cast(level="O1", dtype="float16"):
                data = part(running, seed)
                loss = session.step(data)[1] if session else pipe.train_batch(data, optimizer)
                losses.append(float(loss))
        state = {name: t.numpy().tobytes() for name, t in pipe.layers.own_state().items()}
        verdict = session.report.verdict() if session else ""
        passed = session is None or session.report.passed
    turns._Side.hand_over = hand_over  # type: ignore[method-assign]
    numbers = {"losses": losses, "state": state}
    return {"numbers": numbers, "handed": len(handed), "passed": passed, "verdict": verdict}


def each(runs: list[tuple[Any, ...]]) -> list[Any]:
    return [trained(*run) for run in runs]


def fails(how: str) -> str:
    """In a fused pair an expert of the last rank fails; returns what this rank raises."""

    def failing(*_: Any) -> Any:
        if turns.here.side is not None and fleet.worker_index() == 3:
            if how == "dies":
                os._exit(9)
            raise ValueError("an expert failed")

    forward, backward = Work.forward, Work.backward
    where = "backward" if how == "backward" else "forward"
    kept = {"forward": forward, "backward": backward}[where]
    setattr(Work, where, staticmethod(lambda *call: (failing(), kept(*call))[1]))
    with job(True, 0.001, timeout=20):
        pipe, optimizer = built(1e-6)
        try:
            pipe.train_batch(part(current_job(), 0), optimizer)
        except Exception as error:
            notes = getattr(error, "__notes__", [])
            return "\n".join([type(error).__name__, str(error), *notes])
    return "nothing"
