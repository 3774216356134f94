"""Fits on all ranks with Paddle's callbacks: ``fit_worker.py FOLDER DP PP``; each rank reports."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import paddle
from paddle import nn

import fleetpipe
from fleetpipe import fleet
from tests import pipelines
from tests.fit.test_model import BATCH, ROWS, STEPS, Digits, Losses, layers

RANK = int(os.environ.get("PADDLE_TRAINER_ID", "0"))


class LogWriter:
    """Stands for that of visualdl, which is not installed."""

    rows: ClassVar[list[Any]] = []

    def __init__(self, logdir: str) -> None:
        assert logdir == "visual"

    def add_scalar(self, tag: str, step: int, value: float) -> None:
        self.rows.append([tag, step, value])

    def close(self) -> None:
        self.rows.append("closed")


def main(folder: Path, dp: int, pp: int) -> None:
    # A batch of all replicas has the rows of one without any.
    pipelines.begin(pp, STEPS // dp, rows=ROWS, dp=dp)
    model = fleetpipe.Model(layers())
    optimizer = paddle.optimizer.Momentum(0.1, parameters=model.parameters())
    model.prepare(optimizer, nn.CrossEntropyLoss(), paddle.metric.Accuracy(topk=(1, 2)))
    told = Losses()
    sys.modules["visualdl"] = ModuleType("visualdl")
    setattr(sys.modules["visualdl"], "LogWriter", LogWriter)  # noqa: B010
    callbacks = [
        told,
        paddle.callbacks.VisualDL("visual"),
        paddle.callbacks.LRScheduler(),
        paddle.callbacks.EarlyStopping("acc_top1", mode="max", patience=1),
        paddle.callbacks.ModelCheckpoint(2, str(folder / "kept")),
        paddle.callbacks.ProgBarLogger(log_freq=6, verbose=2),
        paddle.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, verbose=0, min_delta=9),
    ]
    options: Any = {"batch_size": BATCH // dp, "verbose": 0}
    evaluation = Digits(1000, 1045)
    kept = str(folder / "kept")
    data = Digits(0, 6 * BATCH)
    model.fit(data, evaluation, epochs=3, callbacks=callbacks, save_dir=kept, **options)
    result = model.evaluate(evaluation, **options)
    model.save(str(folder / "saved"))
    model.load(str(folder / "saved"))
    (outputs,) = model.predict(evaluation, stack_outputs=True, **options)
    report = {
        "train": told.train,
        "eval": told.eval,
        "rate": optimizer.get_lr(),
        "result": result,
        "outputs": outputs.tolist(),
    }
    if RANK == 0:
        (folder / "visual.json").write_text(json.dumps(LogWriter.rows, default=float))
    else:
        assert not LogWriter.rows
    (folder / f"rank{RANK}.json").write_text(json.dumps(report, default=float))
    fleet.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
