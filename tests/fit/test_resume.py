"""``fit`` that was killed in the middle of an epoch ends with the bits of one that was not."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe.callbacks import PipelineCheckpoint
from fleetpipe.checkpoint.files import writer
from fleetpipe.errors import CheckpointError, ConfigError
from fleetpipe.job import attempt_files
from tests.fit.test_model import BATCH, Digits, fit, layers, prepared
from tests.fixtures import Launch, Patch
from tests.launch.supervisor.commands import launched
from tests.launching import ROOT

WORKER = ROOT / "tests" / "fit" / "resume_worker.py"


def told(log: str) -> list[str]:
    return [line for line in log.splitlines() if line.startswith(("step", "[Epoch", "end"))]


def test_a_training_that_ends_early_goes_on_to_the_same_bits(
    launch: Launch, launcher: Launch, tmp_path: Path
) -> None:
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    alone.mkdir()
    shared.mkdir()
    whole = told(launch(WORKER, None, cwd=alone).logs[0])
    assert len(whole) == 18 + 2 * 3 + 1

    # One rank is asked to stop: all agree in the step that follows, save it and end.
    arguments = ["0.0.2", str(int(signal.SIGTERM))]
    stopped = launch(WORKER, 2, args=arguments, cwd=shared, check=False)
    assert stopped.returncode == attempt_files.PREEMPTED, stopped
    assert "fleetpipe: asked to stop, the job saved 4 steps" in stopped.logs[0]
    assert told(stopped.logs[0]) == whole[:4]

    # It goes on in one process, and is killed there: on from the newest checkpoint.
    arguments = ["0.1.4", str(int(signal.SIGKILL))]
    killed = launch(WORKER, None, args=arguments, cwd=shared, check=False)
    assert killed.returncode == -signal.SIGKILL
    place = whole.index(next(line for line in whole if line.startswith("step 1 4")))
    assert told(killed.logs[0]) == whole[4 : place + 1]
    again = launch(WORKER, None, cwd=shared)
    assert "fleetpipe: goes on after 8 steps" in again.logs[0]
    # Batch 8 of all is the second of the second epoch.
    assert told(again.logs[0]) == whole[place - 2 :]

    # Killed under fleetpipe launch: on by itself from the end of the epoch before, in a script
    # that says nothing of checkpoints.
    arguments = ["1.1.2", str(int(signal.SIGKILL)), "bare"]
    options = ["--max_restart", "1", "--checkpoint_dir", "kept"]
    job = launched(launcher, WORKER, "launch", *options, arguments=arguments, folder=tmp_path)
    assert job.code == 0, job
    assert job.said[1] == "fleetpipe: attempt 2 begins: restart 1 of 1"
    log = (tmp_path / "log" / "workerlog.0").read_text()
    assert "attempt 2 of the job goes on after 6 steps\n" in log
    place = whole.index(next(line for line in whole if line.startswith("step 1 0")))
    # The launcher may end rank 0 before it has shown the step after which rank 1 was killed.
    restarted = len(told(log)) - len(whole[place:])
    assert restarted in (place + 2, place + 3)
    assert told(log) == [*whole[:restarted], *whole[place:]]


def test_checkpoints_are_where_and_as_often_as_asked(
    model: Any, tmp_path: Path, capsys: Any
) -> None:
    home = str(tmp_path / "run")
    fit(model, save_dir=home, save_steps=3, epochs=2)
    # Every third batch, and the two newest of these and of the ends of epochs are kept.
    assert fleetpipe.CheckpointManager(home).steps() == [6, 8]
    assert not list((tmp_path / "run").glob("*.pdparams"))
    with pytest.raises(ConfigError, match="another training"):
        fit(model, save_dir=home, save_steps=3)
    capsys.readouterr()
    assert fit(model, save_dir=home, resume="auto", epochs=2).train == []
    assert "all 2 epochs are trained: nothing is left to do\n" in capsys.readouterr().out
    assert [logs["step"] for logs in fit(model, save_dir=home, resume="auto", epochs=3).train] == [
        *range(4)
    ]
    assert model.global_step == 12
    with pytest.raises(ConfigError, match="resume"):
        fit(model, save_dir=home, resume="latest")


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_training_goes_on_in_another_process_s_model(
    model: Any, tmp_path: Path, shuffle: bool
) -> None:
    home = str(tmp_path / "run")
    # The last batch is short: how many rows count depends on what was read before.
    data = Digits(0, 5 * BATCH + 5)
    options: Any = {"shuffle": shuffle, "epochs": 2, "data": data}
    first = fit(model, save_dir=home, save_steps=2, num_iters=4, **options)
    model = prepared(fleetpipe.Model(layers()))
    rest = fit(model, save_dir=home, resume="auto", accumulate_grad_batches=1, **options)
    model = prepared(fleetpipe.Model(layers()))
    whole = fit(model, **options)
    assert [*first.train, *rest.train] == whole.train
    assert [logs["batch_size"] for logs in rest.train] == [BATCH, 5, *[BATCH] * 5, 5]


def test_the_rate_of_an_epoch_that_was_cut_short_steps_once(model: Any, tmp_path: Path) -> None:
    def trained(folder: str, **options: Any) -> tuple[list[Any], float]:
        rate = paddle.optimizer.lr.StepDecay(0.1, 1)
        model = fleetpipe.Model(layers())
        model.prepare(
            paddle.optimizer.SGD(rate, parameters=model.parameters()), nn.CrossEntropyLoss()
        )
        by_epoch = paddle.callbacks.LRScheduler(by_step=False, by_epoch=True)
        home = str(tmp_path / folder)
        seen = fit(model, by_epoch, save_dir=home, resume="auto", epochs=2, **options)
        return seen.train, rate()

    whole, rate = trained("whole")
    # Within the first epoch; at its end; behind num_iters.
    losses = [trained("parts", num_iters=number)[0] for number in (2, 4, 3)]
    rest, after = trained("parts")
    assert [*losses[0], *losses[1], *rest] == whole
    assert losses[2] == []
    assert after == rate


def test_what_a_checkpoint_counted_is_in_no_evaluation_and_no_other_training(
    model: Any, tmp_path: Path
) -> None:
    cut: dict[str, Any] = {"save_dir": str(tmp_path / "cut"), "resume": "auto", "num_iters": 2}
    fit(model, **cut)
    rows = Digits(4, 4 + BATCH)
    evaluated = model.evaluate(rows, batch_size=BATCH, verbose=0)
    for _ in range(2):
        assert fit(model, **cut).train == []  # the epoch's first half is in the checkpoint
        assert model.evaluate(rows, batch_size=BATCH, verbose=0) == evaluated
    assert fit(model, **cut).train == []
    again = fit(model, num_iters=1).train[0]["acc_top1"]
    assert again * BATCH == pytest.approx(round(again * BATCH))


@pytest.mark.parametrize(
    ("options", "lost"),
    [({"save_steps": 2}, 2), ({"num_iters": 3, "save_steps": 2}, 3), ({}, 4)],
)
def test_a_save_that_failed_is_made_up_for_from_memory(
    model: Any, tmp_path: Path, monkeypatch: Patch, options: dict[str, Any], lost: int
) -> None:
    home, write = str(tmp_path / "run"), writer.write

    def full(task: writer.Assignment, *more: Any) -> None:
        if task.manifest.step == lost:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(task, *more)

    monkeypatch.setenv("FLEETPIPE_KEPT_STATE", str(tmp_path))
    with monkeypatch.context() as until_now:
        until_now.setattr(writer, "write", full)
        with pytest.raises(CheckpointError, match="No space left"):
            fit(model, save_dir=home, resume="auto", **options)
    state = [tensor.numpy().tobytes() for tensor in model.pipeline.layers.state.gather().values()]
    model = prepared(fleetpipe.Model(layers()))
    rest = fit(model, save_dir=home, resume="auto", **options)
    assert len(rest.train) == options.get("num_iters", 4) - lost
    manager = fleetpipe.CheckpointManager(home)
    assert lost in manager.steps()
    model = prepared(fleetpipe.Model(layers()))
    manager.restore(lost, model=model.pipeline)
    again = model.pipeline.layers.state.gather().values()
    assert [tensor.numpy().tobytes() for tensor in again] == state


class Noisy(Digits):
    """Augments by NumPy's generator of the process that loads."""

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return image + np.random.random(64).astype("float32"), label


class Stream(paddle.io.IterableDataset):  # type: ignore[type-arg, unused-ignore]
    """The same in turn, each worker its part."""

    def __iter__(self) -> Iterator[Any]:
        worker: Any = paddle.io.get_worker_info()
        return (NOISY[n] for n in range(worker.id, len(NOISY), worker.num_workers))


NOISY = Noisy(0, 4 * BATCH)
LOADERS: list[Callable[[], Any]] = [
    lambda: paddle.io.DataLoader(NOISY, batch_size=BATCH, shuffle=True),
    lambda: paddle.io.DataLoader(NOISY, batch_size=BATCH, shuffle=True, num_workers=1),
    lambda: paddle.io.DataLoader(
        NOISY, batch_sampler=fleetpipe.io.DistributedBatchSampler(NOISY, BATCH, shuffle=True)
    ),
    lambda: fleetpipe.io.DataLoader(
        NOISY,
        batch_sampler=paddle.io.BatchSampler(NOISY, shuffle=True, batch_size=BATCH),
        num_workers=1,
    ),
    lambda: fleetpipe.io.DataLoader(Stream(), batch_size=BATCH, num_workers=2),
]


@pytest.mark.parametrize("loader", LOADERS)
def test_an_epoch_goes_on_with_its_own_order_and_noise(
    model: Any, tmp_path: Path, loader: Callable[[], Any]
) -> None:
    def trained(seed: int, **options: Any) -> Any:
        np.random.seed(seed)
        paddle.seed(7)
        model = prepared(fleetpipe.Model(layers()))
        return fit(model, data=loader(), epochs=2, **options).train

    home: dict[str, Any] = {"save_dir": str(tmp_path), "resume": "auto"}
    first = trained(0, num_iters=6, **home)
    assert [*first, *trained(99, **home)] == trained(0)


class Counts(paddle.callbacks.Callback):
    """Runs on one rank alone, and has nothing to save before its first batch."""

    on_rank = "first"

    def __init__(self) -> None:
        super().__init__()
        self.counted: dict[str, Any] = {}

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        self.counted["batches"] = self.counted.get("batches", 0) + 1

    def state_dict(self) -> dict[str, Any]:
        return self.counted

    def set_state_dict(self, state: dict[str, Any]) -> None:
        self.counted = dict(state)


def test_a_callback_of_one_rank_goes_on_and_is_not_left_in_the_state_of_the_script(
    model: Any, tmp_path: Path
) -> None:
    state = {"best": 0.5}
    options: Any = {"save_dir": str(tmp_path), "resume": "auto", "state": state}
    fit(model, Counts(), num_iters=2, **options)
    assert state == {"best": 0.5}
    rest = Counts()
    fit(model, rest, **options)
    assert rest.counted == {"batches": 4}


def test_the_best_evaluation_is_kept(model: Any, tmp_path: Path) -> None:
    keeper = PipelineCheckpoint(tmp_path, max_to_keep=1, best=("acc_top1", "max"))
    seen = fit(model, keeper, eval_data=Digits(1000, 1045), epochs=4)
    figures = [logs["acc_top1"] for logs in seen.eval]
    manager = fleetpipe.CheckpointManager(tmp_path, best=("acc_top1", "max"))
    restored = manager.restore("best", model=model.pipeline)
    assert restored.metrics["acc_top1"] == max(figures)
    assert model.evaluate(Digits(1000, 1045), batch_size=BATCH, verbose=0)["acc_top1"] == max(
        figures
    )
    with pytest.raises(ConfigError, match="did you mean 'acc_top"):
        fit(model, PipelineCheckpoint(tmp_path, best=("acc_top3", "max")))
    with pytest.raises(ConfigError, match="every_steps"):
        PipelineCheckpoint(every_steps=0)
