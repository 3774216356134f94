"""A captured pipeline beside the plain model that it was made of."""

from __future__ import annotations

from typing import Any

import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import fleet, parity
from tests.pipelines import CLASSES, FEATURES, batch, job, sgd


class Plain(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, 8)
        self.norm = nn.BatchNorm1D(8)
        self.tail = nn.Linear(8, CLASSES)

    def forward(self, x: Any) -> Any:
        return self.tail(paddle.tanh(self.norm(self.head(x))))


@pytest.mark.parametrize("wrong", [False, True])
def test_a_captured_pipeline_is_compared_by_the_plain_names(wrong: bool) -> None:
    with job(2):
        captured = fleetpipe.pipeline(
            Plain(), batch(1)[0], nn.CrossEntropyLoss(), ["norm"], verify=False
        )
        model = fleet.distributed_model(captured)
        session = parity.begin(model, sgd(model), Plain())
        session.step(batch())
        # A form that is captured in the middle of a run has no more outputs than others.
        session.step([part.split(4) for part in batch(6)])
        assert session.report.bit_exact, session.report.verdict()
        if wrong:
            captured.own_state()["norm.weight"].set_value(paddle.full([8], 2.0))
        session.step(batch(seed=1))
    assert session.report.bit_exact is not wrong
    found = session.report.first_of_a_layer
    assert (found.name if found else None) == ("norm, call 0" if wrong else None)
