"""Figures of a device that computes behind the host: what work takes, and not to queue it.

The device is a stand-in, and so is the time: layers tell the device what their work takes, and
nothing but waiting for it takes any.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe.cli import main
from fleetpipe.dygraph.observe.timers import Timers
from fleetpipe.report.timelines import pipeline_of
from fleetpipe.systems import ProcessorQueue
from tests.fixtures import LogCapture, Patch
from tests.pipelines import FEATURES, batch, model_in_job, sgd

#: Seconds that the forward of a layer takes; its backward takes twice as long.
QUICK, SLOW = 1.0, 3.0


class LateDevice:
    """Has done its work when somebody has waited for it."""

    def __init__(self) -> None:
        self.now, self.queued, self.waits = 0.0, 0.0, 0

    def synchronize(self) -> None:
        """Stands for ``paddle.device.current_stream()`` and its method of this name."""
        self.waits += 1
        self.now, self.queued = self.now + self.queued, 0.0


@pytest.fixture
def device(monkeypatch: Patch) -> LateDevice:
    late = LateDevice()
    monkeypatch.setattr(paddle.device, "current_stream", lambda: late)
    for clock in ("perf_counter", "monotonic", "thread_time"):
        monkeypatch.setattr(time, clock, lambda: late.now)
    monkeypatch.setattr(ProcessorQueue, "seconds", lambda _: 0.0)
    return late


class Works(nn.Linear):  # type: ignore[misc]
    """A layer that takes a while on a device."""

    def __init__(self, device: LateDevice, seconds: float) -> None:
        super().__init__(FEATURES, FEATURES)
        self._device, self._seconds = device, seconds

    def forward(self, x: Any) -> Any:
        def queue(factor: int) -> None:
            self._device.queued += factor * self._seconds

        class Queued(paddle.autograd.PyLayer):  # type: ignore[misc]
            @staticmethod
            def forward(_: Any, y: Any) -> Any:
                queue(1)
                return y.clone()

            @staticmethod
            def backward(_: Any, grad: Any) -> Any:
                queue(2)
                return grad

        return Queued.apply(super().forward(x))


def late_model(device: LateDevice, **options: Any) -> Any:
    """A pipeline of two ranks in this process, whose second stage takes three times as long."""
    layers = [Works(device, QUICK), Works(device, SLOW)]
    return model_in_job(2, 2, layers=layers, seg_method=[0, 1], **options)


def test_a_profile_has_what_stages_take(device: LateDevice) -> None:
    with late_model(device) as model:
        profile = model.profile(batch(2))
    for name, factor in (("forward", 1), ("backward", 2), ("input_grad", 2)):
        assert profile[name] == pytest.approx([factor * QUICK, factor * SLOW]), name
    assert [layer.forward for layer in profile.layers] == pytest.approx([QUICK, SLOW])


def test_a_trace_has_what_actions_take_and_says_how(
    device: LateDevice, tmp_path: Path, caplog: LogCapture, capsys: Any
) -> None:
    with late_model(device, trace=tmp_path) as model:
        for _ in range(2):
            model.train_batch(batch(2), sgd(model))
    pipeline = pipeline_of(None, tmp_path / "trace.json")
    assert pipeline is not None
    taken = {event.name: event.end - event.start for event in pipeline.measured}
    for name, seconds in {"F0.1": QUICK, "F1.1": SLOW, "B1.1": 2 * SLOW, "B0.1": 2 * QUICK}.items():
        assert taken[name] == pytest.approx(seconds), name
    assert main(["why", str(tmp_path)]) == 0
    assert main(["why", "--json", str(tmp_path)]) == 0
    sentence, *_, figures = capsys.readouterr().out.splitlines()
    assert json.loads(figures)["device"] == "gpu"
    for text in (caplog.text, pipeline.caveat, sentence):
        assert "On a gpu each action waited until its work was done" in text


def test_timers_wait_as_fleets_do(device: LateDevice) -> None:
    timer = Timers()("mine")
    device.queued = 2.0
    timer.start()
    device.queued = 3.0
    timer.stop()
    assert timer.elapsed() == 3.0
