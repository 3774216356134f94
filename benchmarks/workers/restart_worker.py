"""One rank of a job that is killed in every life: ``restart_worker.py SEED KILLS STEPS FOLDER``.

Life n is killed at the n-th of the moments that the seed gives, while there are some left. What
happens is written to ``FOLDER/events``, one object of JSON on a line.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

BEGUN = time.monotonic()

import numpy as np  # noqa: E402
import paddle  # noqa: E402
from paddle import nn  # noqa: E402

import fleetpipe  # noqa: E402
from fleetpipe import fleet  # noqa: E402
from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer  # noqa: E402
from fleetpipe.job import attempt_files  # noqa: E402
from tests.chaos import Struck  # noqa: E402

RANK = int(os.environ["PADDLE_TRAINER_ID"])
RANKS = int(os.environ["PADDLE_TRAINERS_NUM"])
MICRO_BATCHES, ROWS, WIDTH = 4, 4, 256
SAVE_INTERVAL = 5
#: In which step of its life a rank is killed: behind a save, so that no step fails twice.
FIRST, LAST = SAVE_INTERVAL + 1, SAVE_INTERVAL + 4


class Kill(NamedTuple):
    """When a rank of one life is killed."""

    moment: str
    rank: int
    step: int
    after: float


def kills(seed: int, count: int) -> list[Kill]:
    """Returns the kills of a job: every moment on every rank in turn, otherwise by chance."""
    chance = random.Random(seed)
    moments = ["forward", "backward", "optimizer", "keeping", "saving", "start"]
    found = []
    for number in range(count - 1):
        moment = moments[number % len(moments)]
        rank = number // len(moments) % RANKS if RANKS > 1 else 0
        found.append(Kill(moment, rank, chance.randint(FIRST, LAST), chance.random()))
    return [*found, Kill("shutdown", RANKS - 1, 0, 0.0)]


def note(folder: Path, **event: Any) -> None:
    """Adds an event."""
    event.update(life=attempt_files.number(), rank=RANK, at=time.monotonic())
    with (folder / "events").open("a") as events:
        events.write(json.dumps(event) + "\n")


def kill_now(folder: Path, kill: Kill) -> None:
    """Ends this process as the kernel's out-of-memory killer would."""
    note(folder, what="killed", moment=kill.moment)
    os.kill(os.getpid(), signal.SIGKILL)


def kill_within(folder: Path, kill: Kill, seconds: float) -> None:
    """Ends it some time from now, at most so long."""
    threading.Timer(kill.after * seconds, kill_now, (folder, kill)).start()


def prepare(model: Any, optimizer: Any, run: Any, folder: Path, kill: Kill) -> None:
    """Has this rank killed at its moment; ``run`` stands before its first step."""
    stage = fleet.get_hybrid_communicate_group().get_stage_id()
    last = run.step + kill.step - 1
    if kill.moment in ("forward", "backward"):
        at = f"{kill.moment[0].upper()}{stage}.{int(kill.after * MICRO_BATCHES)}"
        model.observe(Struck(at, kill.step, lambda: kill_now(folder, kill)))
    elif kill.moment == "optimizer":
        step = optimizer.wrapped.step

        def stepped() -> None:
            if run.step == last:
                kill_within(folder, kill, 0.003)
            step()

        optimizer.wrapped.step = stepped
    elif kill.moment in ("keeping", "saving"):
        done = run.done
        due = -(-(run.step + FIRST) // SAVE_INTERVAL) * SAVE_INTERVAL - 1
        moment = due if kill.moment == "saving" else last

        def finished() -> None:
            if run.step == moment:
                kill_within(folder, kill, 0.02 if kill.moment == "saving" else 0.003)
            done()

        run.done = finished


def main() -> None:
    """Trains."""
    seed, count, steps, place = sys.argv[1:]
    folder, number = Path(place), attempt_files.number()
    planned = kills(int(seed), int(count)) if int(count) else []
    kill = planned[number - 1] if number <= len(planned) else None
    mine = kill if kill is not None and kill.rank == RANK else None
    if mine is not None and mine.moment == "start":
        kill_within(folder, mine, 0.2)
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": RANKS}
    strategy.pipeline_configs = {"accumulate_steps": MICRO_BATCHES, "micro_batch_size": ROWS}
    strategy.fleetpipe_configs = {"timeout": 60}
    fleet.init(is_collective=True, strategy=strategy)
    paddle.seed(1)
    layers = PipelineLayer(
        [
            LayerDesc(nn.Linear, 16, WIDTH),
            *[LayerDesc(nn.Linear, WIDTH, WIDTH), LayerDesc(nn.Dropout, 0.1)] * RANKS,
            LayerDesc(nn.Linear, WIDTH, 4),
        ],
        num_stages=RANKS,
        loss_fn=nn.CrossEntropyLoss(),
    )
    model = fleet.distributed_model(layers)
    rate = paddle.optimizer.lr.ExponentialDecay(0.001, 0.999)
    adam = paddle.optimizer.AdamW(rate, parameters=model.parameters())
    optimizer = fleet.distributed_optimizer(adam)
    manager = fleetpipe.CheckpointManager(
        folder / "checkpoints", save_interval=SAVE_INTERVAL, max_to_keep=2
    )
    run = fleetpipe.resume(model, optimizer, lr_scheduler=rate, manager=manager)
    note(folder, what="goes on", step=run.step, seconds=time.monotonic() - BEGUN)
    if mine is not None:
        prepare(model, optimizer, run, folder, mine)
    for step in run.steps(int(steps)):
        note(folder, what="begun", step=step)
        numbers = np.random.default_rng(step)
        rows = MICRO_BATCHES * ROWS
        inputs = numbers.standard_normal((rows, 16)).astype("float32")
        labels = numbers.integers(0, 4, (rows, 1))
        model.train_batch([paddle.to_tensor(inputs), paddle.to_tensor(labels)], optimizer, rate)
        if kill is not None and kill.moment == "shutdown" and step == int(steps) - 1:
            break
    told = b"".join(tensor.numpy().tobytes() for tensor in layers.state_dict().values())
    note(folder, what="bits", bits=hashlib.sha256(told).hexdigest())
    if mine is not None and mine.moment == "shutdown":
        kill_now(folder, mine)
    fleet.shutdown()


if __name__ == "__main__":
    main()
