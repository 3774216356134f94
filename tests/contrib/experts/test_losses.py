"""Losses of gates in every schedule: the single model's bits, and a dense mixture's numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.incubate.distributed.models.moe import GShardGate, MoELayer

from fleetpipe import fleet, parity
from fleetpipe.contrib.experts import AuxiliaryLoss
from fleetpipe.errors import ConfigError
from fleetpipe.fleet.meta_parallel import LayerDesc
from fleetpipe.schedules import names
from tests.contrib.experts.test_operations import DenseMixture, experts_of
from tests.pipelines import ROWS, job, pipeline

WIDTH, LENGTH, EXPERTS, MICRO_BATCHES, WEIGHT = 8, 5, 3, 3, 0.1
CAPACITY = 0.4
SCHEDULES = [name for name in names() if name != "Seq1F1B"]


class Block(nn.Layer):
    """A mixture with a residual; some tokens are dropped."""

    def __init__(self, random_routing: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        gate = GShardGate(WIDTH, EXPERTS, 1, 2, (CAPACITY, CAPACITY), random_routing)
        self.moe = MoELayer(WIDTH, experts_of(EXPERTS), gate)

    def forward(self, x: Any) -> Any:
        return x + self.moe(self.norm(x))


def layers(**options: Any) -> list[Any]:
    return [
        LayerDesc(nn.Linear, WIDTH, WIDTH),
        LayerDesc(Block, **options),
        nn.functional.tanh,
        LayerDesc(Block, **options),
        LayerDesc(nn.Linear, WIDTH, WIDTH),
    ]


def batch(seed: int) -> list[Any]:
    numbers = np.random.default_rng(seed)
    shape = (MICRO_BATCHES * ROWS, LENGTH, WIDTH)
    return [paddle.to_tensor(numbers.standard_normal(shape).astype("float32")) for _ in range(2)]


def wrapped(**options: Any) -> tuple[Any, Any]:
    pipe = pipeline(layers(**options), loss_fn=AuxiliaryLoss(nn.MSELoss(), WEIGHT))
    adam = paddle.optimizer.Adam(0.01, parameters=pipe.parameters())
    return pipe, fleet.distributed_optimizer(adam)


@pytest.mark.once_for("Eager", "kFkB", "ZBH2", "VHalf", "VMin")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_single_models_bits(schedule: str) -> None:
    with job(2, MICRO_BATCHES, schedule):
        pipe, optimizer = wrapped()
        session = parity.begin(pipe, optimizer)
        session.step(batch(0))
        assert session.report.passed, session.report.verdict()


@pytest.mark.parametrize("schedule", ["1F1B", "ZBV"])
def test_the_dense_mixture(schedule: str) -> None:
    """The loss is the mean of ``criterion + weight * auxiliary`` of the micro-batches.

    An expert that gets no token has a gradient of zeros, as it has in the dense mixture.
    """
    with job(2, MICRO_BATCHES, schedule):
        pipe, _ = wrapped(random_routing=False)
        ours = pipe.layers.state.own_parameters()
        ours["3.moe.gate.gate.bias"].set_value(paddle.to_tensor([-9.0, 9.0, 9.0]))
        single = pipe.layers.single_model()
        pipe.layers.copy_to(single)
        parameters = dict(single.named_parameters())
        blocks = [layer for layer in single.sublayers() if isinstance(layer, Block)]
        for block in blocks:
            moe = block.moe
            block.moe = DenseMixture(moe.experts, moe.gate.gate, "gshard", 2, CAPACITY, False)
        data, total = batch(0), paddle.zeros([])
        for inputs, labels in zip(*(part.split(MICRO_BATCHES) for part in data)):
            loss = nn.functional.mse_loss(single(inputs), labels)
            loss = (loss + WEIGHT * sum(block.moe.loss for block in blocks)) / MICRO_BATCHES
            loss.backward()
            total += loss.detach()
        np.testing.assert_allclose(pipe.forward_backward_pipeline(data), total, rtol=1e-5)
        for name, parameter in parameters.items():
            expected, got = (p.grad.numpy() for p in (parameter, ours[name]))
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6, err_msg=name)
        assert not ours["3.moe.experts.0.0.weight"].grad.any()
        assert ours["3.moe.experts.1.0.weight"].grad.any()


def test_one_loss_takes_them_and_another_does_not() -> None:
    with job(2, MICRO_BATCHES), pytest.raises(ConfigError, match="AuxiliaryLoss, MSELoss"):
        pipeline(layers(), loss_fn=[AuxiliaryLoss(nn.MSELoss()), nn.MSELoss()])


def test_evaluation_returns_the_output_alone() -> None:
    with job(2, MICRO_BATCHES):
        pipe, _ = wrapped(random_routing=False)
        inputs, labels = batch(0)
        outputs = pipe.eval_batch([inputs, labels], compute_loss=False)
        assert paddle.concat(outputs).shape == labels.shape
        assert pipe.layers(inputs).shape == labels.shape


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(ConfigError, match="take='l_aux'"):
        AuxiliaryLoss(nn.MSELoss(), take="l_aux")  # type: ignore[arg-type]
