"""What the workers of the tests' trainers run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

STEPS = 6


def train(config: dict[str, Any]) -> None:
    """Trains a pipeline of two ranks, and goes on where it was; rank 1 dies before a step."""
    import paddle
    import ray.train

    import fleetpipe
    from fleetpipe.contrib.ray import RayCheckpointManager
    from tests import pipelines
    from tests.pipelines import batch, pipeline, sgd

    pipelines.begin(2, 4)
    paddle.seed(3)
    model = pipeline()
    optimizer = sgd(model)
    manager = RayCheckpointManager(save_interval=2)
    run = fleetpipe.resume(model, optimizer, manager=manager)
    rank = int(os.environ["PADDLE_TRAINER_ID"])
    with Path(config["log"], f"steps.{rank}").open("a") as log:
        for step in run.steps(STEPS):
            if step == config["at"] and rank == 1 and first(config["log"], rank):
                ray.train.get_all_reported_checkpoints()  # waits until Ray has taken note of them
                os.kill(os.getpid(), signal.SIGKILL)
            loss = model.train_batch(batch(seed=step), optimizer)
            log.write(f"{step} {loss.item().hex()}\n")
            log.flush()


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


def note_rank(config: dict[str, Any]) -> None:
    """Leaves a file of this rank's number."""
    Path(config["log"], f"began.{os.environ['PADDLE_TRAINER_ID']}").touch()


def fit(config: dict[str, Any]) -> None:
    """Fits; both ranks die after a batch of the first attempt."""
    import paddle
    import ray.train

    import fleetpipe
    from fleetpipe.contrib.ray import ReportCallback
    from tests import pipelines
    from tests.fit.test_model import BATCH, ROWS, Digits, layers
    from tests.fit.test_model import STEPS as MICRO_BATCHES

    class Kill(paddle.callbacks.Callback):
        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            rank = int(os.environ["PADDLE_TRAINER_ID"])
            if step == config["at"] and first(config["log"], rank):
                ray.train.get_all_reported_checkpoints()
                os.kill(os.getpid(), signal.SIGKILL)

    paddle.seed(7)
    pipelines.begin(2, MICRO_BATCHES, rows=ROWS)
    model = fleetpipe.Model(layers())
    optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
    model.prepare(optimizer, paddle.nn.CrossEntropyLoss(), paddle.metric.Accuracy())
    model.fit(
        Digits(0, 4 * BATCH),
        batch_size=BATCH,
        num_workers=1,
        epochs=2,
        verbose=0,
        callbacks=[Kill(), ReportCallback(every_steps=2)],
    )


def read(config: dict[str, Any]) -> None:
    """Reports which rows this rank reads of a dataset in two epochs."""
    import ray.train

    shard = ray.train.get_dataset_shard("train")
    rows = [[batch["id"].tolist() for batch in shard.iter_batches(batch_size=3)] for _ in range(2)]
    rank = ray.train.get_context().get_world_rank()
    Path(config["log"], f"rows.{rank}").write_text(repr(rows))
