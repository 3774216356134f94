"""Figures of a device that computes behind the host: what work takes, and not to queue it.

The device is a stand-in, and so is the time: layers tell the device what their work takes, and
nothing but waiting for it takes any.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe.cli import main
from fleetpipe.contrib.report.timelines import pipeline_of
from fleetpipe.dygraph.observe.timers import Timer
from fleetpipe.engine.observer import Blocked
from fleetpipe.engine.step_meter import EVERY, StepMeter
from fleetpipe.fit.callbacks.throughput import ThroughputMonitor
from fleetpipe.job.job import current_job
from fleetpipe.job.run_progress import RunProgress
from fleetpipe.paddle_api.device import synchronize
from fleetpipe.schedules import Action, Recv, build
from fleetpipe.systems import ProcessorQueue
from tests.fixtures import LogCapture, Patch
from tests.pipelines import FEATURES, batch, model_in_job, sgd

#: Seconds that the forward of a layer takes; its backward takes twice as long.
QUICK, SLOW = 1.0, 3.0


class LateDevice:
    """A device, and its stream, that has done its work once somebody has asked about it."""

    def __init__(self) -> None:
        self.now, self.queued, self.waits = 0.0, 0.0, 0

    def query(self) -> bool:
        """Whether everything has been done, as ``paddle.device.current_stream().query()``."""
        done, self.waits = not self.queued, self.waits + 1
        self.now, self.queued = self.now + self.queued, 0.0
        return done


@pytest.fixture
def device(monkeypatch: Patch) -> LateDevice:
    late = LateDevice()
    monkeypatch.setattr(paddle.device, "current_stream", lambda: late)
    for clock in ("perf_counter", "monotonic", "thread_time"):
        monkeypatch.setattr(time, clock, lambda: late.now)
    monkeypatch.setattr(ProcessorQueue, "seconds", lambda _: 0.0)
    return late


def late_model(device: LateDevice, **options: Any) -> Any:
    """A pipeline of two ranks in this process, whose second stage takes three times as long."""

    class Works(nn.Linear):  # type: ignore[misc]
        def __init__(self, seconds: float) -> None:
            super().__init__(FEATURES, FEATURES)
            self.seconds = seconds

        def forward(self, x: Any) -> Any:
            return Queued.apply(super().forward(x), self.seconds)

    class Queued(paddle.autograd.PyLayer):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, y: Any, seconds: float) -> Any:
            ctx.seconds = seconds
            device.queued += seconds
            return y.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            device.queued += 2 * ctx.seconds
            return grad

    return model_in_job(2, 2, layers=[Works(QUICK), Works(SLOW)], seg_method=[0, 1], **options)


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
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path), "-o", str(page)]) == 0
    capsys.readouterr()
    assert main(["why", str(tmp_path)]) == 0
    assert main(["why", "--json", str(tmp_path)]) == 0
    sentence, *_, figures = capsys.readouterr().out.splitlines()
    assert json.loads(figures)["device"] == "gpu"
    for text in (caplog.text, page.read_text(encoding="utf-8"), sentence):
        assert "On a gpu each action waited until its work was done" in text


def test_one_step_of_some_is_measured_and_the_others_wait_for_nothing(device: LateDevice) -> None:
    with late_model(device) as model:
        running, optimizer, waits = current_job(), sgd(model), []
        assert running is not None
        for _ in range(EVERY + 2):
            model.train_batch(batch(2), optimizer)
            waits.append(device.waits)
            device.waits, device.now = 0, device.now + 0.5
        record = running.progress.record(0, "", with_rows=True)
    # Where the step ends, at the last action of each of two ranks until that is done, and where it
    # begins until what the steps before have left is.
    assert waits == [6, *[0] * (EVERY - 1), 7, 0]
    work = 2 * 3 * (QUICK + SLOW)
    for row in record.rows:
        assert row.cpu == row.wall == (work if row.step == EVERY else 0), row
        assert row.data == (0.5 if row.step % EVERY == 1 else 0), row
    assert record.busy * record.step_time == pytest.approx(work)


def test_what_a_device_waits_for_is_no_computing(device: LateDevice) -> None:
    plan = build("1F1B", ranks=2, micro_batches=1).lower()
    progress = RunProgress()
    progress.synchronize = synchronize
    meter = StepMeter(plan, [0, 1], progress)
    headers = iter([Blocked(0, None), None])  # type: ignore[arg-type]

    def run(seconds: float, blocked: Blocked | None = None) -> Blocked | None:
        device.queued += seconds
        return blocked

    rank: Any = SimpleNamespace(rank=1, values={})
    receive, *actions = (op for op in plan.ops[1] if isinstance(op, (Action, Recv)))
    # Without a header the host waits from when all that is queued is done, until the data is there.
    received = meter.wrap(rank, receive, lambda: run(7.0, next(headers)))
    meter.begin()
    run(2.0)
    assert received() is not None
    assert received() is None
    for action in actions:
        meter.wrap(rank, action, lambda: run(1.0))()
    # What was queued before that wait, and two actions; not the seven that it took.
    assert meter.take().wall == 2.0 + 7.0 + 2.0


def test_other_figures_wait_for_the_device(device: LateDevice) -> None:
    timer, monitor = Timer("mine"), ThroughputMonitor(log_freq=1, verbose=0)
    monitor.set_model(SimpleNamespace(pipeline=SimpleNamespace(peak_held={0: 2}), gather=twice))
    monitor.on_train_begin()
    monitor.on_epoch_begin(0)
    device.queued = 2.0
    timer.start()
    device.queued = 3.0
    timer.stop()
    monitor.on_train_batch_end(0, {"batch_size": 1})
    assert timer.elapsed() == 3.0
    assert monitor.figures["samples_per_second"] == 0.2
    # A host's clock cannot know them.
    assert "bubble_rate" not in monitor.figures
    assert "busy_share_by_rank" not in monitor.by_rank
    with model_in_job(2):
        running = current_job()
        assert running is not None
        device.queued = 5.0
        with running.progress.saving(1):
            synchronize()
        assert running.progress._save == 0.0


def twice(one: Any) -> list[Any]:
    return [one, one]
