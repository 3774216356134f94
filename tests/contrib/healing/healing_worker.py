"""Trains while ranks die: ``healing_worker.py STEPS [WORD ..] [ASK=STEP] [RANK.STEP=PLACE ..]``.

A place is ``forward`` or ``update``, within the step; ``before`` or ``after`` it; ``evaluation``,
which each second step has twice; ``kept``, while the state after it is written; or ``saved``, while
that after so many steps is. Each death happens once; ``stop`` before a step is no death. Rank 0
asks the job to stop in a step, and then not every step is saved. A word is ``EVALUATE``, before the
first step, or ``FIT``, for epochs in the place of steps, which a thread saves.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
from paddle import nn

import fleetpipe
from fleetpipe import fleet
from fleetpipe.checkpoint.files import writer
from fleetpipe.contrib.kept_state import Segment
from fleetpipe.fleet.meta_parallel import LayerDesc
from tests import pipelines
from tests.pipelines import CLASSES, FEATURES, ROWS, batch, pipeline

RANK = int(os.environ.get("PADDLE_TRAINER_ID", "0"))


class Deaths:
    """The deaths that are to happen, and the step that runs."""

    step = -1
    wanted: set[str] = set()  # noqa: RUF012 - never changed

    @classmethod
    def come(cls, place: str, step: int | None = None) -> None:
        """Dies if this rank is to die at a place of a step, by default this one, and has not."""
        name = f"{RANK}.{cls.step if step is None else step}={place}"
        mark = Path(f"died.{name}")
        if name in cls.wanted and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGSTOP if place == "stop" else signal.SIGKILL)


class Mortal(nn.Linear):
    def forward(self, x: Any) -> Any:
        Deaths.come("forward" if self.training else "evaluation")
        return super().forward(x)


class MortalAdam(paddle.optimizer.Adam):
    def step(self) -> None:
        super().step()
        Deaths.come("update")


class FitPlaces(paddle.callbacks.Callback):
    def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
        Deaths.step = self.model.global_step

    def on_eval_batch_end(self, step: int, logs: Any = None) -> None:
        done = self.model.global_step
        sys.stdout.write(f"eval {done} {step}: {logs['loss']} {logs['acc']}\n")
        sys.stdout.flush()


def fit(layers: list[Any], steps: int) -> Any:
    """Trains for epochs of two batches, each of which ends with an evaluation and a save."""
    model = fleetpipe.Model(layers)
    adam = MortalAdam(0.01, parameters=model.parameters())
    model.prepare(adam, nn.CrossEntropyLoss(), paddle.metric.Accuracy())
    rows, labels = batch(4, seed=1)
    data = paddle.io.TensorDataset([rows, labels])
    writer._report_path = report
    callbacks = [
        FitPlaces(),
        fleetpipe.callbacks.PipelineCheckpoint(max_to_keep=None, async_save=True),
    ]
    model.fit(data, data, batch_size=2 * ROWS, epochs=steps, verbose=0, callbacks=callbacks)
    return model.network


def report(draft: Path, rank: int, report: Callable[..., Path] = writer._report_path) -> Path:
    """Dies while a state is saved, maybe by a thread, once this rank's part of it is written."""
    Deaths.come("saved", int(draft.name.split("-")[1]))
    return report(draft, rank)


def dying(function: Callable[..., Any], place: str) -> Callable[..., Any]:
    """Returns a function that dies where it is called at a place, with its work half done."""

    def die(*arguments: Any) -> Any:
        Deaths.come(place)
        return function(*arguments)

    return die


def main() -> None:
    steps, *words = sys.argv[1:]
    Deaths.wanted = {word for word in words if "=" in word}
    limit = 4 if words[-1:] == ["1.3=stop"] else 30
    pipelines.begin(pp=2, micro_batches=2, timeout=limit, allow=["optimizer:MortalAdam"])
    paddle.seed(7)
    layers = [LayerDesc(Mortal, FEATURES, 8), LayerDesc(nn.Dropout, 0.5)]
    layers += [LayerDesc(nn.BatchNorm1D, 8), LayerDesc(Mortal, 8, CLASSES)]
    if "FIT" in words:
        sys.stdout.write(f"bits {fleetpipe.model_hash(fit(layers, int(steps)))}\n")
        fleet.shutdown()
        return
    model = pipeline(layers)
    rate = paddle.optimizer.lr.ExponentialDecay(0.01, 0.9)
    optimizer = fleet.distributed_optimizer(MortalAdam(rate, parameters=model.parameters()))
    folder = os.environ.get("FLEETPIPE_CHECKPOINT_DIR", "own")
    asked = [int(word.partition("=")[2]) for word in words if word.startswith("ASK=")]
    manager = fleetpipe.CheckpointManager(folder, save_interval=100 if asked else 1)
    if "EVALUATE" in words:
        model.eval_batch(batch(2, seed=1), compute_loss=True)
    run = fleetpipe.resume(model, optimizer, lr_scheduler=rate, manager=manager)
    Segment._mark_slot = dying(Segment._mark_slot, "kept")  # type: ignore[method-assign]
    writer._report_path = report
    for step in run.steps(int(steps)):
        Deaths.step = step
        Deaths.come("before")
        Deaths.come("stop")
        if RANK == 0 and step in asked:
            run.stop()
        paddle.seed(step)
        # An iterator, of which each step takes what it needs and no more.
        data = iter([batch(1, seed=10 * step + k) for k in range(2)])
        loss = model.train_batch(data, optimizer)
        Deaths.come("after")
        for number in range(2 * (step % 2)):
            mean = model.eval_batch(batch(2, seed=number), compute_loss=True)
            sys.stdout.write(f"eval {step} {number}: {mean.numpy().tobytes().hex()}\n")
        rate.step()
        sys.stdout.write(f"step {step} {loss.numpy().tobytes().hex()} {len([*data])}\n")
        sys.stdout.flush()
    sys.stdout.write(f"bits {fleetpipe.model_hash(model)}\n")
    fleet.shutdown()


if __name__ == "__main__":
    main()
