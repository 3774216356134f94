"""Pairs and triples of axes, and random models of them, beside plain Paddle on one device.

``python -m tests.processes.combinations.random_mixtures 0 100`` tries as many, and so does
``random_attention``, from 1000 on under every pair and triple of axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe import fleet
from fleetpipe.job.job import current_job
from fleetpipe.paddle_api import VERSION
from tests import pipelines
from tests.fixtures import Call
from tests.pipelines import CLASSES, FEATURES, ROWS, batch, pipeline
from tests.processes.combinations import random_attention, random_mixtures
from tests.processes.combinations.beside_plain import Case, every, wrong

pytestmark = pytest.mark.once


def cases(mixtures: Sequence[int], attention: Sequence[int]) -> list[Case]:
    """Those that this Paddle's topology has."""
    made = [random_mixtures.RandomCase(number) for number in mixtures]
    made += [random_attention.RandomCase(number) for number in attention]
    missing = {"ep", "cp"} if VERSION.startswith("2.") else set()
    return [case for case in made if not missing & case.degrees.keys()]


@pytest.mark.parametrize("case", cases((2, 45), (16, 32)), ids=lambda case: case.name)
def test_in_one_process(case: Case) -> None:
    assert not wrong(case, *every([case]))


def test_on_four_ranks(on_ranks: Call) -> None:
    # Of attention: split in every way, by plans too, and members of parts.
    chosen = cases((9, 26, 254), (4, 10, 12, 27, 51, 1037, 1049, 1077))
    for rank in on_ranks(every, 4, chosen, timeout=240):
        for case, gaps in zip(chosen, rank):
            assert not wrong(case, gaps), (case, gaps)


STEPS, MICRO_BATCHES, NORM = 3, 2, 0.5


def optimizer_of(parameters: Any) -> Any:
    """AdamW that clips at each of the first steps."""
    clip = nn.ClipGradByGlobalNorm(NORM)
    return paddle.optimizer.AdamW(0.01, parameters=parameters, grad_clip=clip)


def gaps(pairs: Sequence[tuple[str, str]]) -> list[dict[str, float]]:
    """Trains under each pair, and the single model beside: the largest differences of both."""
    return [_gap(dict.fromkeys(pair, 2)) for pair in pairs]


def _gap(degrees: dict[str, int]) -> dict[str, float]:
    strategy = pipelines.strategy(MICRO_BATCHES, **{"dp": 1, "pp": 1, **degrees})
    fleet.init(is_collective=True, strategy=strategy)
    job = current_job()
    assert job is not None
    paddle.seed(1 + job.coordinate.dp)  # broadcast from the first copy
    model = pipeline([nn.Linear(FEATURES, 8), nn.functional.tanh, nn.Linear(8, CLASSES)])
    single = model.layers.single_model()
    single.set_state_dict(model.layers.full_state_dict())
    optimizer = fleet.distributed_optimizer(optimizer_of(model.parameters()))
    plain = optimizer_of(single.parameters())
    copies, rows = job.copies().ranks, MICRO_BATCHES * ROWS
    loss_gap = norm_gap = 0.0
    for step in range(STEPS):
        inputs, labels = batch(copies * MICRO_BATCHES, step)
        mine = [part[job.copy * rows :][:rows] for part in (inputs, labels)]
        loss = float(model.train_batch(mine, optimizer))
        expected = nn.functional.cross_entropy(single(inputs), labels)
        expected.backward()
        squares = [float((p.grad.astype("float64") ** 2).sum()) for p in single.parameters()]
        norm = sum(squares) ** 0.5
        plain.step()
        plain.clear_grad()
        loss_gap = max(loss_gap, abs(loss - float(expected)))
        norm_gap = max(norm_gap, abs((optimizer.gradient_norm or 0.0) - norm))
    trained = model.layers.full_state_dict()
    parameters = [float((trained[n] - v).abs().max()) for n, v in single.state_dict().items()]
    fleet.shutdown()
    return {"loss": loss_gap, "norm": norm_gap, "parameters": max(parameters)}


def test_copies_along_sequences_train_as_one_device_does(on_ranks: Call) -> None:
    pairs = [("pp", "sep"), ("dp", "sep")]
    if not VERSION.startswith("2."):  # 2.6.2 has no cp_degree
        pairs += [("pp", "cp"), ("sharding", "cp")]
    for rank in on_ranks(gaps, 4, pairs):
        assert [max(pair.values()) < 2e-6 for pair in rank] == [True] * len(pairs), rank
