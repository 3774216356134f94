"""What the workers of the tests' trainers run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any


def first(log: str, rank: int) -> bool:
    """Whether this rank asks for the first time."""
    try:
        Path(log, f"asked.{rank}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class DiesWhereItIsRead:
    """Ends rank 1 the first time that it reads this: while Ray hands the train loop to it."""

    def __init__(self, log: str) -> None:
        self.log = log

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if os.environ.get("PADDLE_TRAINER_ID") == "1" and first(self.log, 1):
            os.kill(os.getpid(), signal.SIGKILL)


def fit_with(*callbacks: Any) -> None:
    """Fits two epochs of four batches in a job of two stages."""
    import paddle

    import fleetpipe
    from tests import pipelines
    from tests.fit.test_model import BATCH, ROWS, STEPS, Digits, layers

    paddle.seed(7)
    pipelines.begin(2, STEPS, rows=ROWS)
    model = fleetpipe.Model(layers())
    optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
    model.prepare(optimizer, paddle.nn.CrossEntropyLoss(), paddle.metric.Accuracy())
    options: dict[str, Any] = {"num_workers": 1, "epochs": 2, "verbose": 0}
    model.fit(Digits(0, 4 * BATCH), batch_size=BATCH, callbacks=[*callbacks], **options)


def fit(config: dict[str, Any]) -> None:
    """Fits and reports; both ranks die after a batch of the first attempt."""
    import paddle
    import ray.train

    from fleetpipe.contrib.ray import ReportCallback

    class Kill(paddle.callbacks.Callback):
        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            rank = int(os.environ["PADDLE_TRAINER_ID"])
            if step == config["at"] and first(config["log"], rank):
                ray.train.get_all_reported_checkpoints()  # waits until Ray has taken note of them
                os.kill(os.getpid(), signal.SIGKILL)

    fit_with(Kill(), ReportCallback(every_steps=2))


def read(config: dict[str, Any]) -> None:
    """Reports which rows this rank reads of a dataset in two epochs."""
    import ray.train

    shard = ray.train.get_dataset_shard("train")
    rows = [[batch["id"].tolist() for batch in shard.iter_batches(batch_size=3)] for _ in range(2)]
    rank = ray.train.get_context().get_world_rank()
    Path(config["log"], f"rows.{rank}").write_text(repr(rows))
