"""A device that does not repeat its bits: parity says so, and compares within what it repeats."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleetpipe import numerics, parity
from fleetpipe.fleet.meta_parallel import LayerDesc
from fleetpipe.parity import tolerance
from tests.fixtures import Patch
from tests.pipelines import batch, job, mlp_layers, pipeline, sgd

NOISE = np.random.default_rng(3)


class Noisy(nn.Linear):  # type: ignore[misc]
    """Adds up in another order each time, as a kernel with atomic additions does."""

    size = 1e-6

    def forward(self, input: Any) -> Any:
        noise = paddle.to_tensor(NOISE.standard_normal(input.shape).astype("float32"))
        return super().forward(input * (1 + self.size * noise))


def compared(patch: Patch, device: str = "gpu", size: float = 1e-6, wrong: float = 1) -> Any:
    """Trains three steps, the gradient of one layer of the pipeline ``wrong`` times what it is."""
    patch.setattr(tolerance, "device_kind", lambda: device)
    patch.setattr(Noisy, "size", size)
    first, *rest = mlp_layers()
    with job(2):
        model = pipeline([first, LayerDesc(Noisy, 8, 8), *rest])
        session = parity.begin(model, sgd(model))
        weight = dict(model.layers.named_parameters())["1.weight"]
        weight.register_hook(lambda gradient: gradient * wrong)
        for step in range(3):
            session.step(batch(seed=step))
        session.eval_batch(batch(), compute_loss=True)
    return session.report


def test_what_does_not_repeat_passes_within_what_it_repeats(monkeypatch: Patch) -> None:
    report = compared(monkeypatch)
    _, repeats, verdict = report.verdict().splitlines()
    assert repeats.startswith("parity: this device does not repeat its bits: two runs on it alone")
    assert verdict.startswith("parity: equal within what this device repeats")
    assert (report.passed, report.bit_exact) == (True, False)
    assert 1e-8 < report.largest_spread[0] < 1e-4


@pytest.mark.parametrize("wrong", [1.01, 1.001])
def test_what_is_wrong_beside_it_is_named(wrong: float, monkeypatch: Patch) -> None:
    report = compared(monkeypatch, wrong=wrong)
    assert "does not repeat its bits" in report.verdict()
    assert (report.first_of_a_layer.quantity, report.first_of_a_layer.name) == (
        ("gradient", "1.weight")
    )


def test_what_is_drawn_anew_in_each_run_does_not_pass(monkeypatch: Patch) -> None:
    assert not compared(monkeypatch, size=1.0).passed


def test_on_a_cpu_the_reference_runs_once_and_nothing_passes(monkeypatch: Patch) -> None:
    report = compared(monkeypatch, device="cpu")
    assert not report.passed
    assert "repeat" not in report.verdict()


def test_a_gpu_repeats_its_bits_as_far_as_its_flags_can(monkeypatch: Patch) -> None:
    flags: dict[str, Any] = {}
    monkeypatch.setattr(paddle.device, "get_device", lambda: "gpu:0")
    monkeypatch.setattr(paddle, "set_flags", flags.update)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    numerics.repeat_bits()
    assert flags["FLAGS_embedding_deterministic"] == flags["FLAGS_cudnn_deterministic"] == 1
    assert numerics.settings()["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
