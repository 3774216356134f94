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
from tests.pipelines import sgd

CASES: dict[str, tuple[Any, list[Any], Any, list[str], float]] = {
    "dropouts": (Residual, batch(8), nn.CrossEntropyLoss(), ["blocks.3", "blocks.6"], 0.0),
    "skips and statistics": (UNet, [images(8, 16)[0], PIXELS], of_pixels, ["middle", "up2"], 1e-5),
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
