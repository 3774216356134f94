"""The extra callbacks: what they print, and what trackers get."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from paddle import nn

import fleetpipe
from fleetpipe.callbacks import LogMetricByEpoch, LossMonitor, MetricsLogger
from fleetpipe.errors import BoundaryError, ConfigError
from fleetpipe.fleet.meta_parallel import LayerDesc
from tests import pipelines
from tests.fit.test_callbacks import fit
from tests.fit.test_model import BATCH, ROWS, STEPS, Digits, layers, prepared


@pytest.fixture
def model() -> Iterator[Any]:
    with pipelines.job(pp=2, micro_batches=STEPS, rows=ROWS):
        yield prepared(fleetpipe.Model(layers()))


def test_the_loss_is_printed_every_so_often(model: Any, capsys: Any) -> None:
    told = fit(model, LossMonitor(3), epochs=2)
    losses = [logs["loss"][0] for logs in told.train]
    assert capsys.readouterr().out.splitlines() == [
        f"epoch: 1 step: 3, loss is {losses[2]}",
        f"epoch: 2 step: 2, loss is {losses[5]}",
    ]


class Spoiled(Digits):
    """One pixel of the second micro-batch of the second batch is infinite."""

    def __init__(self) -> None:
        super().__init__(0, 2 * BATCH)
        self.images[BATCH + ROWS, 0] = np.inf


@pytest.mark.parametrize("find_layer", [False, True])
def test_a_loss_that_is_no_number_ends_the_training(model: Any, find_layer: bool) -> None:
    monitor = LossMonitor(0, find_layer=find_layer)
    model = prepared(fleetpipe.Model([LayerDesc(nn.Linear, 64, 64), LayerDesc(nn.Linear, 64, 10)]))
    with pytest.raises(BoundaryError, match=r"the loss is (nan|inf)") as caught:
        fit(model, monitor, data=Spoiled(), shuffle=False)
    place = "epoch 1, step 2, micro-batch 1"
    assert place + (", layer '0'" if find_layer else "\n") in str(caught.value)


def test_a_copy_of_a_layer_copies_no_monitor(model: Any) -> None:
    class Monitor(LossMonitor):  # type: ignore[misc]
        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("the monitor was copied")

        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            copied.extend(copy.deepcopy(self.model.network.sublayers()))

    copied: list[Any] = []
    fit(model, Monitor(0, find_layer=True))
    assert copied


def test_a_negative_number_of_batches_is_refused() -> None:
    with pytest.raises(ConfigError, match="per_print_times"):
        LossMonitor(-1)


def test_lines_of_an_epoch(model: Any, capsys: Any) -> None:
    told = fit(model, LogMetricByEpoch(), eval_data=Digits(1000, 1000 + BATCH))
    train, test = capsys.readouterr().out.splitlines()
    mean = np.mean([logs["loss"][0] for logs in told.train])
    last, (evaluated,) = told.train[-1], told.eval
    assert train == (
        f"[Epoch 1 / Train]: Loss = {mean:.5g} | acc_top1 = {last['acc_top1']:.5g}"
        f" | acc_top2 = {last['acc_top2']:.5g} | LR = 0.01"
    )
    assert test == (
        f"[Epoch 1 / Test]: Loss = {evaluated['loss'][0]:.5g}"
        f" | acc_top1 = {evaluated['acc_top1']:.5g} | acc_top2 = {evaluated['acc_top2']:.5g}"
    )


class Tracker(ModuleType):
    """What stands for wandb and for mlflow: keeps what is sent, by run."""

    def __init__(self) -> None:
        super().__init__("tracker")
        self.runs: dict[str, list[tuple[int, dict[str, float]]]] = {}
        self.id = ""
        self.ended = 0

    def init(self, *, dir: str, name: str, id: str | None, resume: str, config: Any) -> Any:
        assert (resume, config) == ("allow", {"width": 3})
        return self._begin(id)

    def start_run(self, *, run_id: str | None, run_name: str) -> Any:
        self._begin(run_id)
        return SimpleNamespace(info=SimpleNamespace(run_id=self.id))

    def _begin(self, run: str | None) -> Any:
        self.id = run or f"run-{len(self.runs)}"
        self.runs.setdefault(self.id, [])
        return self

    def log(self, figures: dict[str, float], step: int) -> None:
        self.runs[self.id].append((step, figures))

    log_metrics = log

    def log_params(self, config: Any) -> None:
        assert config == {"width": 3}

    def finish(self) -> None:
        self.ended += 1

    end_run = finish


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_trackers_get_every_row_and_go_on_with_their_run(
    model: Any, tmp_path: Path, monkeypatch: Any, name: str
) -> None:
    tracker = Tracker()
    tracker.__spec__ = ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, name, tracker)
    for _ in range(2):
        told = fit(model, MetricsLogger(tmp_path, formats=name, config={"width": 3}))
    ((run, rows),) = tracker.runs.items()
    assert (tmp_path / f"{name}.id").read_text() == f"{run}\n"
    assert [step for step, _ in rows] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [row["train/loss"] for _, row in rows[4:]] == [logs["loss"][0] for logs in told.train]
    assert tracker.ended == 2


def test_a_word_among_the_callbacks_is_a_format(model: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    fit(model, "tensorboard", save_dir=str(tmp_path / "run"))
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4
    assert list((tmp_path / "run").glob("events.out.tfevents.*"))
    with pytest.raises(ConfigError, match="no format 'wandbb'") as caught:
        fit(model, "wandbb")
    assert "wandb" in str(caught.value)
