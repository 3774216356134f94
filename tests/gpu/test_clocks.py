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
from fleetpipe.engine.observer import Blocked
from fleetpipe.engine.step_meter import EVERY, StepMeter, StepTimes
from fleetpipe.fit.callbacks.throughput import ThroughputMonitor
from fleetpipe.job.run_progress import RunProgress
from fleetpipe.paddle_api.device import synchronize
from fleetpipe.report.timelines import pipeline_of
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
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path), "-o", str(page)]) == 0
    capsys.readouterr()
    assert main(["why", str(tmp_path)]) == 0
    assert main(["why", "--json", str(tmp_path)]) == 0
    sentence, *_, figures = capsys.readouterr().out.splitlines()
    assert json.loads(figures)["device"] == "gpu"
    for text in (caplog.text, page.read_text(encoding="utf-8"), sentence):
        assert "On a gpu each action waited until its work was done" in text


def test_a_step_that_nobody_measures_waits_for_nothing(device: LateDevice) -> None:
    with late_model(device) as model:
        optimizer, waits = sgd(model), []
        for _ in range(EVERY + 2):
            model.train_batch(batch(2), optimizer)
            waits.append(device.waits)
            device.waits = 0
    # Where the step ends, at the last action of each of two ranks until that is done, and where it
    # begins until what the steps before have left is.
    assert waits == [6, *[0] * (EVERY - 1), 7, 0]


def test_timers_wait_as_fleets_do(device: LateDevice) -> None:
    timer = Timers()("mine")
    device.queued = 2.0
    timer.start()
    device.queued = 3.0
    timer.stop()
    assert timer.elapsed() == 3.0


def test_one_step_of_some_is_measured(device: LateDevice) -> None:
    plan = build("1F1B", ranks=2, micro_batches=2).lower()
    meter = StepMeter(plan, [0, 1], synchronize=synchronize)
    progress, blocked = RunProgress(), [True]

    class Played:
        rank, values = 1, {}  # type: ignore[var-annotated]

    def compute() -> None:
        device.queued += 1.0

    def receive() -> Blocked | None:
        """The host waits for a header, and the device for the data that it orders then."""
        blocked[0] = not blocked[0]
        if blocked[0]:
            device.queued += 7.0
            return None
        return Blocked(0, None)  # type: ignore[arg-type]

    ops = [op for op in plan.ops[1] if isinstance(op, (Action, Recv))]
    program = [meter.wrap(Played(), op, receive if isinstance(op, Recv) else compute) for op in ops]
    steps: list[StepTimes] = []

    class Kept:
        begin = meter.begin

        def take(self) -> StepTimes:
            steps.append(meter.take())
            return steps[-1]

    for _ in range(EVERY + 2):
        with progress.step_of(Kept()):
            for instruction in program:
                while instruction() is not None:
                    pass
        device.now += 0.5
    for number, step in enumerate(steps):
        measured = number % EVERY == 0
        assert (step.cpu, step.probe) == (step.wall, 0)
        assert step.wall == (4.0 if measured else 0.0)
        assert step.data == (0.5 if number % EVERY == 1 else 0.0)
    # Without the two waits of seven in the one step of the last ten that is measured.
    record = progress.record(0, "", with_rows=False)
    assert record.busy * record.step_time == pytest.approx(4.0)


def test_a_save_does_not_take_what_the_device_still_computes(device: LateDevice) -> None:
    progress = RunProgress()
    progress.synchronize = synchronize
    device.queued = 5.0
    with progress.saving(1):
        synchronize()
    assert progress._save == 0.0


def test_throughput_counts_what_is_computed_and_no_shares_of_the_host(device: LateDevice) -> None:
    monitor = ThroughputMonitor(log_freq=1, verbose=0)

    class Model:
        pipeline = type("Pipeline", (), {"peak_held": {0: 2}})

        @staticmethod
        def gather(one: Any) -> list[Any]:
            return [one, one]

    monitor.set_model(Model())
    monitor.on_train_begin()
    monitor.on_epoch_begin(0)
    device.queued = 5.0
    monitor.on_train_batch_end(0, {"batch_size": 1})
    assert monitor.figures["samples_per_second"] == 0.2
    assert "bubble_rate" not in monitor.figures
    assert "busy_share_by_rank" not in monitor.by_rank
