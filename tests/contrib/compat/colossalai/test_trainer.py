"""The tutorial's Trainer and its hooks, beside a loop over the engine by hand."""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleetpipe.contrib.compat import colossalai
from fleetpipe.contrib.compat.colossalai import nn as col_nn
from fleetpipe.contrib.compat.colossalai.logging import get_dist_logger
from fleetpipe.contrib.compat.colossalai.nn.lr_scheduler import LinearWarmupLR
from fleetpipe.contrib.compat.colossalai.trainer import Trainer, hooks
from fleetpipe.contrib.compat.colossalai.utils import MultiTimer
from fleetpipe.errors import StateError, UsageError
from tests.contrib.compat.colossalai.test_engine import ROWS, batch, launched, partitioned, recorded
from tests.pipelines import bits


class Lines:
    """Stands for a logger."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, message: str, ranks: Any = None) -> None:
        self.lines.append(message)


@pytest.fixture
def program() -> Iterator[Any]:
    """An engine with Adam and the tutorial's schedule of the learning rate, as it makes them."""
    with launched():
        yield made()


def made() -> Any:
    model = partitioned(recorded())
    adam = paddle.optimizer.Adam(1e-3, parameters=model.parameters())
    schedule = LinearWarmupLR(adam, 2, warmup_steps=1)
    return colossalai.initialize(model, adam, nn.CrossEntropyLoss(), None, None, schedule, False)


TRAIN = [0, 1, 2]
TEST = [7, 8]


def by_hand(program: Any) -> tuple[list[str], list[float]]:
    """The four lines of two epochs, and the losses, by the engine's own steps."""
    engine, _, _, schedule = program
    lines, losses = [], []
    accuracy = col_nn.metric.Accuracy()
    for epoch in range(2):
        engine.train()
        found = []
        for number in TRAIN:
            engine.zero_grad()
            _, _, loss = engine.execute_schedule(iter([batch(number)]))
            engine.step()
            found.append(float(loss))
        schedule.step()
        lines.append(
            f"[Epoch {epoch} / Train]: Loss = {sum(found) / len(found):.5g}"
            f" | LR = {schedule.last_lr:.5g}"
        )
        losses += found
        engine.eval()
        tested, right = [], 0
        for number in TEST:
            output, label, loss = engine.execute_schedule(iter([batch(number)]), True)
            tested.append(float(loss))
            right += int(accuracy(output, label))
        lines.append(
            f"[Epoch {epoch} / Test]: Loss = {sum(tested) / len(tested):.5g}"
            f" | Accuracy = {right / (ROWS * len(TEST)):.5g}"
        )
    return lines, losses


class Recorder(hooks.BaseHook):
    """A hook of the user's own: keeps the order of the events, and what it is given."""

    def __init__(self) -> None:
        super().__init__(priority=5)
        self.events: list[str] = []
        self.losses: list[float] = []
        self.right = 0
        for name in dir(hooks.BaseHook):
            if name.startswith(("before", "after")):
                setattr(self, name, self._noting(name))

    def _noting(self, name: str) -> Any:
        def note(trainer: Any, *given: Any) -> None:
            self.events.append(name)
            if name == "after_train_iter":
                output, label, loss = given
                assert output.shape == [ROWS, 10]
                assert label.shape == [ROWS, 1]
                assert np.array_equal(label.numpy(), batch(trainer.cur_step % 3)[1].numpy())
                self.losses.append(float(loss))

        return note


def test_the_four_lines_of_the_tutorial(program: Any) -> None:
    logger, recorder, timer = Lines(), Recorder(), MultiTimer()
    engine, _, _, schedule = program
    trainer = Trainer(engine=engine, timer=timer, logger=get_dist_logger())
    hook_list = [
        recorder,
        hooks.LossHook(),
        hooks.AccuracyHook(col_nn.metric.Accuracy()),
        hooks.LogMetricByEpochHook(logger),  # type: ignore[arg-type]
        hooks.LRSchedulerHook(schedule, by_epoch=True),
    ]
    other = made()
    other[0].model.layers.load_from(engine.model.layers.full_state_dict())
    trainer.fit(
        train_dataloader=list(map(batch, TRAIN)),
        epochs=2,
        test_dataloader=list(map(batch, TEST)),
        test_interval=1,
        hooks=hook_list,
        display_progress=False,
    )
    expected, losses = by_hand(other)
    assert logger.lines == expected
    assert recorder.losses == losses
    assert bits(engine.model.layers.state_dict()) == bits(other[0].model.layers.state_dict())
    epoch = ["before_train_epoch", *(["before_train_iter", "after_train_iter"] * 3)]
    epoch += ["after_train_epoch", "before_test", "before_test_epoch"]
    epoch += [*(["before_test_iter", "after_test_iter"] * 2), "after_test_epoch", "after_test"]
    begin = ["after_hook_is_attached", "before_train"]
    assert recorder.events == [*begin, *epoch, *epoch, "after_train"]
    assert (trainer.cur_epoch, trainer.cur_step) == (2, 6)
    step = timer.get_timer("Train-step")
    assert step.get_history_mean() == pytest.approx(step.get_history_sum() / 6)


def test_few_steps_and_a_rate_by_step(program: Any, capsys: Any) -> None:
    engine, _, _, schedule = program
    trainer = Trainer(engine)
    hook_list = [hooks.LossHook(), hooks.LRSchedulerHook(schedule, by_epoch=False)]
    trainer.fit(list(map(batch, TRAIN)), 5, max_steps=4, hooks=hook_list, display_progress=True)
    assert (trainer.cur_epoch, trainer.cur_step) == (2, 4)
    assert schedule.last_epoch == 4
    assert list(trainer.states["metrics"]["train"]) == ["Loss", "LR"]
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("epoch 2/2, batch 1/3: loss ")


def test_a_training_with_checkpoints_goes_on(program: Any, tmp_path: Path) -> None:
    def run(program: Any, folder: Path, max_steps: int | None) -> list[str]:
        engine, _, _, schedule = program
        logger = Lines()
        hook_list = [
            hooks.SaveCheckpointHook(2, folder, save_by_iter=True),
            hooks.LossHook(),
            hooks.LRSchedulerHook(schedule, by_epoch=True),
            hooks.LogMetricByEpochHook(logger),  # type: ignore[arg-type]
        ]
        Trainer(engine).fit(list(map(batch, TRAIN)), 2, max_steps=max_steps, hooks=hook_list)
        return logger.lines

    start = program[0].model.layers.full_state_dict()
    whole = run(program, tmp_path / "whole", None)
    other = made()
    other[0].model.layers.load_from(start)
    cut = run(other, tmp_path / "cut", 2)
    again = made()
    assert run(again, tmp_path / "cut", None) == whole
    assert cut != whole[:1]
    assert bits(again[0].model.layers.state_dict()) == bits(program[0].model.layers.state_dict())


def test_what_a_trainer_refuses(program: Any) -> None:
    trainer = Trainer(program[0])
    with pytest.raises(UsageError, match="with a length"):
        trainer.fit(iter([batch(0)]), 1)
    with pytest.raises(UsageError, match=r"LossHook\(\.\.\)"):
        trainer.fit([batch(0)], 1, hooks=[hooks.LossHook])  # type: ignore[list-item]
    with pytest.raises(StateError, match="within a hook"):
        trainer.from_last_stage(1)
    # And trains afterwards.
    trainer.fit([batch(0)], 1)
    program[0].zero_grad()
    assert float(program[0].execute_schedule(iter([batch(0)]))[2]) > 0


def test_timers() -> None:
    timer = MultiTimer()
    for _ in range(2):
        timer.start("Train-step")
        timer.stop("Train-step", keep_in_history=True)
    timer.start("Test-step")
    step = timer.get_timer("Train-step")
    assert step.get_history_mean() == step.get_history_sum() / 2 > 0
    timer.reset()
    assert step.get_history_mean() == step.get_elapsed_time() == 0
    with pytest.raises(StateError, match="does not run"):
        timer.stop("Test-step")
    with pytest.raises(StateError, match="did you mean 'Train-step'"):
        timer.reset("Train-Stp")
    silent = MultiTimer(on=False)
    silent.start("Other")
    assert silent.stop("Other") is None


def write_cifar(folder: Path, images: int = 12) -> Path:
    """Writes digits as CIFAR-10's tar."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    large = np.kron(digits.images / 16 * 255, np.ones((4, 4))).astype("uint8")
    rows = large.reshape(len(large), 1, -1).repeat(3, axis=1).reshape(len(large), -1)
    file = folder / "cifar-10-python.tar.gz"
    with tarfile.open(file, "w:gz") as tar:
        for number, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
            part = slice(number * images, (number + 1) * images)
            content = pickle.dumps(
                {b"data": rows[part], b"labels": digits.target[part].tolist()}, protocol=2
            )
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return file


def test_cifar_is_read_from_its_file_alone(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=str(tmp_path / "cifar-10-python.tar.gz")):
        colossalai.build_cifar(8, tmp_path)
    write_cifar(tmp_path)
    with launched():
        train, test = colossalai.build_cifar(8, tmp_path, padding=4, crop=32, resize=16)
        # Five parts of 12; the last 4 images of an epoch are left out.
        epochs = [[images.numpy() for images, _ in train] for _ in range(2)]
        assert [len(epoch) for epoch in epochs] == [7, 7]
        assert epochs[0][0].shape == (8, 3, 32, 32)
        assert not np.array_equal(epochs[0][0], epochs[1][0])
        again, _ = colossalai.build_cifar(8, tmp_path / "cifar-10-python.tar.gz", 4, 32)
        assert all(map(np.array_equal, epochs[0], [images.numpy() for images, _ in again]))
        shapes = [(images.shape, labels.shape) for images, labels in test]
        assert shapes == [([8, 3, 16, 16], [8]), ([4, 3, 16, 16], [4])]
