"""A captured model trains under every schedule, with recompute, random streams, and parity."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import fleet, parity
from tests.capture.models import GPT, IMAGE_CLASSES, Residual, UNet, images, require_bits, tokens
from tests.capture.test_models import PIXELS, of_pixels, of_tokens
from tests.dygraph.models import gradients_in_w
from tests.pipelines import CLASSES, FEATURES, begin, bits, job, sgd
from tests.pipelines import batch as rows

#: Chunks on each of two ranks, by schedule.
SCHEDULES = {
    "FThenB": 1,
    "1F1B": 1,
    "Eager1F1B": 1,
    "ZBH1": 1,
    "Interleaved1F1B": 2,
    "ZBV": 2,
    "DualPipeV": 2,
    "Hanayo": 2,
}
CUTS = {1: ["blocks.4"], 2: ["blocks.2", "blocks.4", "blocks.6"]}


def batch(rows: int) -> list[Any]:
    numbers = np.random.default_rng(0)
    return [
        paddle.to_tensor(numbers.standard_normal((rows, 4)).astype("float32")),
        paddle.to_tensor(numbers.integers(0, IMAGE_CLASSES, (rows, 1))),
    ]


@pytest.mark.once_for("FThenB", "Eager", "Hanayo")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_gives_the_bits_of_the_plain_model(schedule: str) -> None:
    chunks = SCHEDULES[schedule]
    done = require_bits(
        lambda: Residual(dropout=0.0), batch(8), CUTS[chunks], schedule, num_chunks=chunks
    )
    split = schedule in ("ZBH1", "ZBV", "DualPipeV")
    assert len(gradients_in_w(done.model._runtime.stage.split)) == (20 if split else 0)


def test_recompute_gives_the_bits_of_the_plain_model() -> None:
    require_bits(lambda: Residual(dropout=0.0), batch(8), ["blocks.4"], recompute_interval=3)


@pytest.mark.parametrize("kind", ["hook", "spectral_norm"])
def test_a_layer_with_a_hook_is_recomputed(kind: str) -> None:
    def build() -> Any:
        inner = nn.Linear(8, 8)
        if kind == "hook":
            inner.register_forward_post_hook(lambda layer, inputs, output: output + inputs[0])
        else:
            inner = getattr(nn.utils, kind)(inner)
        return nn.Sequential(nn.Linear(8, 8), inner, nn.Tanh(), nn.Linear(8, 4))

    with job(2):
        inputs = paddle.randn([2, 8])
        pipe = fleetpipe.pipeline(
            *(build(), inputs, nn.CrossEntropyLoss(), ["3"]), recompute_interval=1
        )
        assert "equal in bits" in str(pipe.proof)


class Sparse(nn.Layer):  # type: ignore[misc]
    """An embedding whose gradient has the rows that a batch looks up, taken by each stage."""

    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.embed, self.skips = nn.Embedding(9, 4, sparse=True), skips
        self.blocks = nn.LayerList([nn.Linear(8, 8) for _ in range(3)])
        self.head = nn.Linear(8, IMAGE_CLASSES)

    def forward(self, x: Any) -> Any:
        y = embedded = self.embed(x).flatten(1)
        for block in self.blocks:
            y = block(y).tanh() + embedded * embedded * self.skips
        return self.head(y)


@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
def test_a_sparse_embedding_has_the_bits_of_the_plain_model(schedule: str) -> None:
    inputs, labels = paddle.randint(0, 9, [8, 2]), batch(8)[1]
    cut = ["blocks.1", "blocks.2", "head"]
    require_bits(lambda: Sparse(False), [inputs, labels], cut, schedule)
    with job(4, 4, schedule):
        pipe = fleetpipe.pipeline(Sparse(True), inputs[:2], nn.CrossEntropyLoss(), cut)
        assert "embed.weight" in pipe.proof.rounded
        model = fleet.distributed_model(pipe)
        optimizer = sgd(model)
        for _ in range(3):
            model.train_batch([inputs, labels], optimizer)


def test_dropouts_have_the_bits_of_the_plain_model_under_the_same_keys() -> None:
    require_bits(Residual, batch(8), ["blocks.4"], keyed=True)


def _after(split_spec: list[str], **options: Any) -> tuple[bytes, dict[str, bytes]]:
    """Trains two steps with dropout and returns the last loss and the state."""
    with job(len(split_spec) + 1):
        paddle.seed(3)
        pipe = fleetpipe.pipeline(
            Residual(), batch(2)[0], nn.CrossEntropyLoss(), split_spec, verify=False, **options
        )
        model = fleet.distributed_model(pipe)
        optimizer = sgd(model)
        paddle.seed(9)
        loss = [model.train_batch(batch(8), optimizer) for _ in range(2)][-1]
        return loss.numpy().tobytes(), bits(pipe.state_dict())


def test_a_dropout_does_not_depend_on_the_cut_nor_on_recompute() -> None:
    once = _after(["blocks.4"])
    assert _after(["blocks.1", "blocks.2"]) == once
    assert _after(["blocks.4"], recompute_interval=2) == once


def wide(blocks: int) -> Any:
    """A model of 2 MiB for each block, beside which activations are nothing."""
    ends = [(nn.Linear(256, 1024), nn.Linear(1024, 256)) for _ in range(blocks)]
    return nn.Sequential(*(nn.Sequential(first, nn.Tanh(), last) for first, last in ends))


def most_alive() -> int:
    """The most bytes of tensors that this process ever had at once: 2.6.2 begins no new count."""
    return int(paddle.base.core.host_memory_stat_peak_value("Allocated", 0))


def adamw(model: Any) -> Any:
    clip = nn.ClipGradByGlobalNorm(1.0)
    return paddle.optimizer.AdamW(0.01, parameters=model.parameters(), grad_clip=clip)


def trained_on_one_device_and_on_ranks(lazy: bool) -> tuple[int, int]:
    """Returns what one device took for the whole model, or for half of it, and the rank then."""
    begin(2, 4)
    numbers = np.random.default_rng(0).standard_normal((2, 8, 256)).astype("float32")
    inputs, labels = map(paddle.to_tensor, numbers)
    alone = wide(4 if lazy else 8)
    optimizer = adamw(alone)
    for _ in range(2):
        nn.functional.mse_loss(alone(inputs), labels).backward()
        optimizer.step()
        optimizer.clear_grad()
    del alone, optimizer
    gc.collect()
    one_device = most_alive()
    with paddle.LazyGuard() if lazy else contextlib.nullcontext():
        plain = wide(8)
    pipe = fleetpipe.pipeline(plain, inputs[:2], nn.MSELoss(), ["4"])
    model = fleet.distributed_model(pipe)
    optimizer = fleet.distributed_optimizer(adamw(pipe))
    for _ in range(3):
        model.train_batch([inputs, labels], optimizer)
    return one_device, most_alive()


@pytest.mark.parametrize("lazy", [False, True])
def test_no_rank_takes_more_memory_than_one_device(
    lazy: bool, on_ranks: Callable[..., list[Any]]
) -> None:
    """A lazy model takes what its own stage takes, any other at most what the whole model does."""
    for one_device, rank in on_ranks(trained_on_one_device_and_on_ranks, 2, lazy):
        assert rank <= one_device * (1.05 if lazy else 1.0)


class Shifted(nn.Layer):  # type: ignore[misc]
    """Has a buffer itself, which its forward writes, beside statistics and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)
        self.norm, self.dropout = nn.BatchNorm1D(4), nn.Dropout(0.3)
        self.register_buffer("mean", paddle.zeros([4]))

    def forward(self, x: Any) -> Any:
        x = self.norm(self.first(x))
        if self.training:
            self.mean.set_value(0.9 * self.mean + 0.1 * x.detach().mean(0))
        return self.second(self.dropout(paddle.tanh(x - self.mean)))


CASES: dict[str, tuple[Any, list[Any], Any, list[str], float]] = {
    "dropouts": (Residual, batch(8), nn.CrossEntropyLoss(), ["blocks.3", "blocks.6"], 0.0),
    "skips and statistics": (UNet, [images(8, 16)[0], PIXELS], of_pixels, ["middle", "up2"], 1e-5),
    "a buffer of the model": (
        *(Shifted, [paddle.randn([8, 4]), paddle.randint(0, 3, [8, 1])]),
        *(nn.CrossEntropyLoss(), ["second"], 0.0),
    ),
    "a tied weight": (GPT, [tokens(8), tokens(8, seed=1)], of_tokens, ["blocks.2"], 1e-5),
}


@pytest.mark.parametrize("name", CASES)
def test_a_captured_pipeline_passes_parity(name: str) -> None:
    build, data, loss_fn, split_spec, tolerance = CASES[name]
    with job(len(split_spec) + 1):
        paddle.seed(1)
        pipe = fleetpipe.pipeline(build(), data[0][:2], loss_fn, split_spec, verify=False)
        model = fleet.distributed_model(pipe)
        session = parity.begin(model, sgd(model))
        for _ in range(2):
            session.step(data)
        # Stages of a U-Net hand on several tensors: what may differ there does not need to.
        assert session.report.tolerance == tolerance
        assert session.report.bit_exact or name == "a tied weight"
        assert session.report.passed, session.report.verdict()
        assert len(session.report.single_loss) == 2


class Plain(nn.Layer):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.head, self.tail = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        self.norm = nn.BatchNorm1D(8)

    def forward(self, x: Any) -> Any:
        return self.tail(paddle.tanh(self.norm(self.head(x))))


@pytest.mark.parametrize("wrong", [False, True])
def test_a_captured_pipeline_is_compared_by_the_plain_names(wrong: bool) -> None:
    with job(2, 4):
        captured = fleetpipe.pipeline(
            Plain(), rows(1)[0], nn.CrossEntropyLoss(), ["norm"], verify=False
        )
        model = fleet.distributed_model(captured)
        session = parity.begin(model, sgd(model), Plain())
        session.step(rows())
        # A form that is captured in the middle of a run has no more outputs than others.
        session.step([part.split(4) for part in rows(6)])
        assert session.report.bit_exact, session.report.verdict()
        if wrong:
            captured.own_state()["norm.weight"].set_value(paddle.full([8], 2.0))
        session.step(rows(seed=1))
    assert session.report.bit_exact is not wrong
    found = session.report.first_of_a_layer
    changed = "norm.weight" if wrong else None
    assert (found.name.partition(",")[0] if found else None) == changed
