"""Cards that ranks share, or that compute behind the host; and what a CPU cannot show of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleetpipe.dygraph.observe.hooks import Timer
from fleetpipe.engine.observer import Blocked
from fleetpipe.engine.step_meter import EVERY, StepMeter
from fleetpipe.errors import ConfigError, UsageError
from fleetpipe.fit.callbacks.metrics import ThroughputMonitor
from fleetpipe.job import attempt_files
from fleetpipe.job.job import current_job
from fleetpipe.job.records import RunProgress
from fleetpipe.launch.noted_launch import require_sockets
from fleetpipe.paddle_api import launcher
from fleetpipe.paddle_api.device import synchronize
from fleetpipe.schedules import Action, Recv, build
from tests.gpu.late_device import QUICK, SLOW, LateDevice, late_model
from tests.gpu.pretending import LEFT_OUT, pretend
from tests.launching import ROOT
from tests.pipelines import Trained, batch, model_in_job, momentum, sgd, train


def trained(transport: str | None = None) -> Trained:
    """Trains on replicas that are fed alike: their mean has the bits of one."""
    pretend(pytest.MonkeyPatch())
    return train(configs={"dp": 2, "transport": transport}, optimizer=momentum)


def test_ranks_that_share_a_card_have_the_bits_of_one_process(
    on_ranks: Callable[..., list[Any]],
) -> None:
    assert on_ranks(trained, 4) == [train(optimizer=momentum)] * 4


def refused() -> str:
    with pytest.raises(ConfigError) as error:
        trained("process_group")
    return str(error.value)


def test_ranks_that_share_a_card_have_no_process_groups(on_ranks: Callable[..., list[Any]]) -> None:
    for text in on_ranks(refused, 4):
        assert "NCCL refuses two ranks on one card" in text


COMMAND = """
import pytest
from tests.gpu.pretending import pretend
pretend(pytest.MonkeyPatch())
from fleetpipe.launch.noted_launch import launch
launch()
"""


def test_fewer_cards_than_ranks_end_the_launcher_before_a_rank_starts(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("open('started', 'w')")
    command = [sys.executable, "-c", COMMAND, "--nproc_per_node", "2", str(script)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0", attempt_files.FOLDER: str(tmp_path)}
    environment["PYTHONPATH"] = str(ROOT)
    run = partial(subprocess.run, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    done = run(command, env=environment)
    assert (done.returncode, (tmp_path / "started").exists()) == (2, False)
    assert "FLEETPIPE_TRANSPORT=sockets" in done.stderr
    done = run(command, env={**environment, "FLEETPIPE_TRANSPORT": "sockets"})
    assert (done.returncode, (tmp_path / "started").exists()) == (0, True), done.stderr


@pytest.mark.parametrize(
    ("visible", "labels"), [("0", ["0"]), ("3,1,7", ["3"]), ("GPU-5ebe9fd2,", ["GPU-5ebe9fd2"])]
)
def test_the_launcher_counts_the_cards_that_are_there(
    monkeypatch: pytest.MonkeyPatch, visible: str, labels: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert launcher._present_device().labels == labels


def launched(ranks: int, cards: int, devices: str = "") -> Any:
    """What Paddle's launcher knows of a host with cards, for so many ranks."""
    device = launcher._Device(launcher._device.DeviceType.GPU, labels=[*map(str, range(cards))])
    arguments = SimpleNamespace(nproc_per_node=ranks, devices=devices)
    context = SimpleNamespace(args=arguments, node=SimpleNamespace(device=device), envs={})
    return SimpleNamespace(ctx=context)


@pytest.mark.parametrize(
    ("ranks", "cards", "devices"),
    [(2, 2, ["0", "1"]), (2, 1, ["0", "0"]), (5, 2, ["0", "1", "0", "1", "0"])],
)
def test_ranks_share_cards_in_turn_where_they_send_over_sockets(
    monkeypatch: pytest.MonkeyPatch, ranks: int, cards: int, devices: list[str]
) -> None:
    monkeypatch.setenv("FLEETPIPE_TRANSPORT", "sockets")
    host = launched(ranks, cards)
    assert launcher._ranks_of_host(host, require_sockets) == ranks
    assert host.ctx.node.device.get_selected_devices("") == devices
    over = {"PADDLE_DISTRI_BACKEND": "gloo"} if cards < ranks else {}
    assert host.ctx.envs == over
    monkeypatch.delenv("FLEETPIPE_TRANSPORT")
    if cards < ranks:
        with pytest.raises(UsageError, match="two ranks on one card"):
            launcher._ranks_of_host(launched(ranks, cards), require_sockets)


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
        assert running.progress._save_seconds == 0.0


def twice(one: Any) -> list[Any]:
    return [one, one]


def test_what_is_left_out_is_there() -> None:
    for name in chain(*LEFT_OUT.values()):
        file, _, test = name.partition("::")
        path = ROOT / "tests" / file
        assert path.exists(), name
        assert not test or f"def {test}" in path.read_text(encoding="utf-8"), name
