"""A training that ends early: ``resume_worker.py [LIFE.EPOCH.STEP SIGNAL] [bare]``; it prints all.

Batches are shuffled, layers drop, the learning rate decays, and callbacks count: all of these must
go on where they were. The last rank is the one that is killed.
"""

from __future__ import annotations

import hashlib
import os
import sys
from typing import Any

import paddle
from paddle import nn

import fleetpipe
from fleetpipe import fleet
from fleetpipe.callbacks import LogMetricByEpoch, PipelineCheckpoint
from fleetpipe.fleet.meta_parallel import LayerDesc
from fleetpipe.job import attempt_files
from tests import pipelines
from tests.fit.test_model import BATCH, ROWS, STEPS, Digits, layers

RANK, RANKS = (int(os.environ.get(f"PADDLE_TRAINER{name}", "0")) for name in ("_ID", "S_NUM"))


class Kill(paddle.callbacks.Callback):
    """Gives the last rank a signal after a batch of one life."""

    def __init__(self, place: list[int], number: int) -> None:
        super().__init__()
        self.place, self.number = place, number
        self.epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        print("step", self.epoch, step, logs["loss"], logs["acc"], flush=True)
        if [attempt_files.number(), self.epoch, step] == self.place and max(RANKS - 1, 0) == RANK:
            os.kill(os.getpid(), self.number)


def main(place: str = "", number: str = "0", bare: str = "") -> None:
    paddle.seed(7)
    pipelines.begin(2, STEPS, rows=ROWS)
    descriptions = [*layers()[:2], LayerDesc(nn.Dropout, 0.1), *layers()[2:]]
    model = fleetpipe.Model(descriptions)
    rate = paddle.optimizer.lr.StepDecay(0.02, step_size=5)
    optimizer = paddle.optimizer.AdamW(rate, parameters=model.parameters())
    model.prepare(optimizer, nn.CrossEntropyLoss(), paddle.metric.Accuracy())
    callbacks = [
        LogMetricByEpoch(),
        paddle.callbacks.EarlyStopping("acc", mode="max", patience=2, save_best_model=False),
        Kill([int(part) for part in place.split(".") if part], int(number)),
    ]
    options: Any = {"batch_size": BATCH, "verbose": 0, "callbacks": callbacks}
    if not bare:
        callbacks.append(PipelineCheckpoint("checkpoints", every_steps=4, best=("acc", "max")))
        options["resume"] = "auto"
    model.fit(Digits(0, 6 * BATCH), Digits(1000, 1045), epochs=3, **options)
    state = model.network.full_state_dict()
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in state.values()))
    print("end", digest.hexdigest(), model.global_step, model.learning_rate, flush=True)
    fleet.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
