"""Buffers that no state dict has are compared too."""

from __future__ import annotations

from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe import parity
from fleetpipe.fleet.meta_parallel import LayerDesc
from tests.parity.defects import differences
from tests.pipelines import batch, mlp_layers, model_in_job, sgd


class Counting(nn.Layer):
    """Has two buffers that no state dict has, of which one is made in the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", paddle.zeros([1]), persistable=False)

    def forward(self, value: Any) -> Any:
        self.calls = self.calls + 1
        self.largest = value.detach().max()
        return self.linear(value) + 0.01 * self.calls


def counting_layers() -> list[Any]:
    layers = mlp_layers()
    return [*layers[:3], LayerDesc(Counting), *layers[3:]]


@pytest.mark.parametrize("name", ["calls", "largest"])
def test_a_stale_buffer_that_is_not_saved_is_found(name: str) -> None:
    with model_in_job(3, layers=counting_layers()) as model:
        session = parity.begin(model, sgd(model))
        session.step(batch())
        assert session.report.passed, session.report.verdict()
        (layer,) = (part for part in model.layers.sublayers() if isinstance(part, Counting))
        layer.register_forward_post_hook(lambda *_: setattr(layer, name, paddle.zeros([1])))
        session.step(batch(seed=1))
    assert ("buffer", f"3.{name}", 1) in differences(session.report)
    assert not session.report.bit_exact


def test_the_reference_begins_with_the_pipelines_buffers() -> None:
    with model_in_job(3, layers=counting_layers()) as model:
        model.eval_batch(batch(), compute_loss=True)
        session = parity.begin(model, sgd(model))
        session.step(batch())
    assert session.report.passed, session.report.verdict()
