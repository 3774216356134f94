"""``fleetpipe.parity`` compares a captured pipeline with its plain model, dropouts included."""

from __future__ import annotations

from typing import Any

import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import fleet, parity
from tests.capture.beside import images
from tests.capture.models import GPT, Residual, UNet, tokens
from tests.capture.test_models import PIXELS, of_pixels, of_tokens
from tests.capture.test_training import batch
from tests.jobs import job
from tests.pipelines import CLASSES, FEATURES, sgd
from tests.pipelines import batch as rows


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
