"""Layers that write into what a stage was given, in training as in one process."""

from __future__ import annotations

from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe.fleet.meta_parallel import LayerDesc
from tests.pipelines import batch, model_in_job, sgd, train


@pytest.mark.parametrize("interval", [0, 1])
@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
@pytest.mark.parametrize("begin", [1, 2])
def test_a_layer_may_write_into_its_input(begin: int, schedule: str, interval: int) -> None:
    steps = 0

    def late(x: Any) -> Any:
        return nn.functional.relu_(x) if steps >= begin else x

    def found(pp: int, schedule: str = "1F1B", **options: Any) -> Any:
        nonlocal steps
        steps = 0

        def each_step(_model: Any) -> None:
            nonlocal steps
            steps += 1

        linear = [LayerDesc(nn.Linear, *size) for size in ((6, 8), (8, 8), (8, 4))]
        layers = [layer for pair in zip([late] * 3, linear) for layer in pair]
        return train(layers, pp, schedule, steps=3, each_step=each_step, gradients=True, **options)

    options = {"recompute_interval": interval, "recompute_ctx": {}} if interval else {}
    assert found(3, schedule, seg_method=[0, 2, 4], **options) == found(1)


def write_into_labels(output: Any, label: Any) -> Any:
    loss = nn.functional.cross_entropy(output, label)
    label.set_value(label * 0)
    return loss


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_the_users_data_stay_as_they_are(micro_batches: int) -> None:
    layers = [nn.functional.relu_, LayerDesc(nn.Linear, 6, 8), LayerDesc(nn.Linear, 8, 4)]
    data = batch(micro_batches)
    before = [tensor.clone() for tensor in data]
    with model_in_job(2, micro_batches, "ZBH1", layers=layers, loss_fn=write_into_labels) as model:
        model.train_batch(data, sgd(model))
        model.eval_batch(data, compute_loss=True)
    for tensor, same in zip(data, before):
        assert tensor.numpy().tobytes() == same.numpy().tobytes()


class Counting(nn.Linear):
    """Hands its number of calls on, which it counts in place."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("calls", paddle.zeros([1]))

    def forward(self, x: Any) -> Any:
        self.calls.add_(paddle.ones([1]))
        return super().forward(x), self.calls


@pytest.mark.parametrize("schedule", ["1F1B", "FThenB", "ZBH1"])
def test_a_buffer_that_is_handed_on_may_change_afterwards(schedule: str) -> None:
    layers = [LayerDesc(Counting, 6, 8), lambda x: x[0] * x[1], LayerDesc(nn.Linear, 8, 4)]
    found = train(layers, 2, schedule, seg_method=[0, 1], gradients=True)
    assert found == train(layers, 1, gradients=True)
