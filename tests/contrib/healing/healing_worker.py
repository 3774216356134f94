"""Trains while ranks die: ``healing_worker.py STEPS [EVALUATE] [ASK=STEP] [RANK.STEP=PLACE ..]``.

A place is ``forward`` or ``update``, within the step; ``before`` or ``after`` it; or ``kept``,
while the state after it is written. Each death happens once; ``stop`` before a step is no death.
Rank 0 asks the job to stop in a step, and then not every step is saved.
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
from fleetpipe.contrib.kept_state.segment import Segment
from fleetpipe.fleet.meta_parallel import LayerDesc
from tests import jobs
from tests.pipelines import CLASSES, FEATURES, batch, pipeline

RANK = int(os.environ.get("PADDLE_TRAINER_ID", "0"))


class Deaths:
    """The deaths that are to happen, and the step that runs."""

    step = -1
    wanted: set[str] = set()  # noqa: RUF012 - never changed

    @classmethod
    def come(cls, place: str) -> None:
        """Dies if this rank is to die at a place of this step, and has not."""
        name = f"{RANK}.{cls.step}={place}"
        mark = Path(f"died.{name}")
        if name in cls.wanted and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGSTOP if place == "stop" else signal.SIGKILL)


class Mortal(nn.Linear):
    def forward(self, x: Any) -> Any:
        Deaths.come("forward")
        return super().forward(x)


class MortalAdam(paddle.optimizer.Adam):
    def step(self) -> None:
        super().step()
        Deaths.come("update")


def dying(function: Callable[..., Any], place: str) -> Callable[..., Any]:
    """Returns a function that dies where it is called at a place, with its work half done."""

    def die(*arguments: Any) -> Any:
        Deaths.come(place)
        return function(*arguments)

    return die


def main() -> None:
    steps, *words = sys.argv[1:]
    Deaths.wanted = {word for word in words if "=" in word}
    jobs.begin(pp=2, micro_batches=2, timeout=4 if words[-1:] == ["1.3=stop"] else 30)
    paddle.seed(7)
    layers = [LayerDesc(Mortal, FEATURES, 8), LayerDesc(nn.Dropout, 0.5)]
    layers += [LayerDesc(nn.BatchNorm1D, 8), LayerDesc(Mortal, 8, CLASSES)]
    model = pipeline(layers)
    rate = paddle.optimizer.lr.ExponentialDecay(0.01, 0.9)
    optimizer = fleet.distributed_optimizer(MortalAdam(rate, parameters=model.parameters()))
    folder = os.environ.get("FLEETPIPE_CHECKPOINT_DIR", "own")
    asked = [int(word.partition("=")[2]) for word in words if word.startswith("ASK=")]
    manager = fleetpipe.CheckpointManager(folder, save_interval=100 if asked else 1)
    if "EVALUATE" in words:
        model.eval_batch(batch(2, seed=1), compute_loss=True)
    run = fleetpipe.resume(model, optimizer, lr_scheduler=rate, manager=manager)
    Segment._mark = dying(Segment._mark, "kept")  # type: ignore[method-assign]
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
        rate.step()
        sys.stdout.write(f"step {step} {loss.numpy().tobytes().hex()} {len([*data])}\n")
        sys.stdout.flush()
    sys.stdout.write(f"bits {fleetpipe.model_hash(model)}\n")
    fleet.shutdown()


if __name__ == "__main__":
    main()
