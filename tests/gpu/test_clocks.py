"""Figures of a device that computes behind the host: what work takes, and not to queue it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fleetpipe.dygraph.observe.timers import Timer
from fleetpipe.engine.observer import Blocked
from fleetpipe.engine.step_meter import EVERY, StepMeter
from fleetpipe.fit.callbacks.throughput import ThroughputMonitor
from fleetpipe.job.job import current_job
from fleetpipe.job.run_progress import RunProgress
from fleetpipe.paddle_api.device import synchronize
from fleetpipe.schedules import Action, Recv, build
from tests.gpu.late_device import QUICK, SLOW, LateDevice, late_model
from tests.pipelines import batch, model_in_job, sgd


def test_a_profile_has_what_stages_take(device: LateDevice) -> None:
    with late_model(device) as model:
        profile = model.profile(batch(2))
    for name, factor in (("forward", 1), ("backward", 2), ("input_grad", 2)):
        assert profile[name] == pytest.approx([factor * QUICK, factor * SLOW]), name
    assert [layer.forward for layer in profile.layers] == pytest.approx([QUICK, SLOW])


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
    # With what the host does of a step besides.
    assert work <= record.busy * record.step_time < work + 2.0


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
