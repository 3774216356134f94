"""``fit`` on several ranks beside one process: losses and metrics are equal on every rank."""

from __future__ import annotations

import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn

import fleetpipe
from fleetpipe import fleet
from tests import jobs
from tests.fit.test_model import BATCH, ROWS, STEPS, Digits, Losses, layers
from tests.fixtures import Call, Launch
from tests.launching import ROOT

WORKER = ROOT / "tests" / "fit" / "fit_worker.py"


def reports(launch: Launch, folder: Path, nproc: int | None, dp: int) -> list[Any]:
    home = folder / f"{nproc}-{dp}"
    home.mkdir()
    logs = launch(WORKER, nproc, args=[str(home), str(dp), "2"]).logs
    # Paddle's ProgBarLogger tells on the first rank alone.
    assert [log.count("step 6/6 - loss: ") for log in logs] == [3, *[0] * (len(logs) - 1)]
    # Of ModelCheckpoint epochs 0 and 2 and the end, of EarlyStopping the best: whole models.
    kept = {file.name for file in (home / "kept").glob("*.pdparams")}
    assert kept == {f"{name}.pdparams" for name in ("0", "2", "final", "best_model")}
    return [json.loads(file.read_text()) for file in sorted(home.glob("rank*.json"))]


def saved(folder: Path) -> dict[str, Any]:
    """What ``Model.save`` wrote, parameters and state of the optimizer in one."""
    state: dict[str, Any] = {}
    for ending in ("pdparams", "pdopt"):
        state.update(pickle.loads((folder / f"saved.{ending}").read_bytes()))
    return state


def test_every_rank_sees_what_one_process_sees(launch: Launch, tmp_path: Path) -> None:
    (alone,) = reports(launch, tmp_path, None, 1)
    assert len(alone["train"]) == 18
    assert alone["rate"] == 0.1 * 0.5**2
    assert len(alone["outputs"]) == 45
    assert reports(launch, tmp_path, 2, 1) == [alone] * 2
    alone_visual, visual = (
        json.loads((tmp_path / name / "visual.json").read_text()) for name in ("None-1", "2-1")
    )
    assert visual == alone_visual
    assert [row for row in visual if row[0] == "train/loss"] == [
        ["train/loss", step, logs["loss"][0]] for step, logs in enumerate(alone["train"], 1)
    ]
    files = saved(tmp_path / "None-1")
    assert str(files) == str(saved(tmp_path / "2-1"))
    first, *others = reports(launch, tmp_path, 4, 2)
    assert others == [first] * 3
    for mine, other in zip(first["train"] + first["eval"], alone["train"] + alone["eval"]):
        assert np.allclose(mine.pop("loss"), other.pop("loss"), atol=1e-5)
        assert mine == other
    assert np.allclose(first["outputs"], alone["outputs"], atol=1e-4)
    of_replicas = saved(tmp_path / "4-2")
    assert list(of_replicas) == list(files)
    arrays = [name for name, value in files.items() if isinstance(value, np.ndarray)]
    assert len(arrays) == 12
    assert all(np.allclose(of_replicas[name], files[name], atol=1e-4) for name in arrays)


class Counted(Digits):
    """Counts the samples that are read."""

    read = 0

    def __getitem__(self, index: int) -> Any:
        Counted.read += 1
        return super().__getitem__(index)


def fitted() -> tuple[list[Any], int, int]:
    """What a fit and a prediction tell, and how many samples each reads."""
    Counted.read = 0
    jobs.begin(3, STEPS, rows=ROWS)
    model = fleetpipe.Model(layers())
    sgd = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    model.prepare(sgd, nn.CrossEntropyLoss(), paddle.metric.Accuracy())
    losses = Losses()
    options: dict[str, Any] = {"batch_size": BATCH, "verbose": 0}
    data = Counted(0, 2 * BATCH + 5), Counted(1000, 1041)
    model.fit(*data, epochs=2, callbacks=losses, **options)
    trained = Counted.read
    (outputs,) = model.predict(data[1], stack_outputs=True, **options)
    fleet.shutdown()
    return [losses.train, losses.eval, outputs.tolist()], trained, Counted.read - trained


def test_a_rank_between_the_first_and_the_last_reads_no_sample(on_ranks: Call) -> None:
    alone = fitted()
    first, between, last = on_ranks(fitted, 3)
    assert alone[1:] == (2 * (2 * 32 + 5) + 2 * 41, 41)
    assert first == last == alone
    assert between == (alone[0], 0, 0)


def warned() -> list[str]:
    with jobs.job(pp=2), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        paddle.Model(nn.Linear(2, 2))
        fleetpipe.Model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    return [str(one.message) for one in seen if "fleetpipe.Model" in str(one.message)]


def test_paddles_model_says_on_ranks_that_it_cuts_nothing(on_ranks: Call) -> None:
    for messages in on_ranks(warned, 2):
        (message,) = messages
        assert message.startswith("paddle.Model runs the whole network on each rank: pp_degree=2")
