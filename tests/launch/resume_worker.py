"""Trains with ``fleetpipe.resume``: ``resume_worker.py STEPS [HAPPENS ..]``; see test_resume.py.

What happens is ``LIFE.RANK.STEP=SIGNAL``: in that step the rank sends itself the signal, or, where
it is ``supervisor``, has whoever started the job asked to stop, or, where it is ``all``, has every
process asked twice, workers of a loader too, as a scheduler does, or, where it is an operation such
as ``B1.1``, kills itself before that. Each step takes at least ``RESUME_WORKER_PAUSE`` seconds, and
every ``RESUME_WORKER_SAVES``-th is saved.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
import sys
import time
from pathlib import Path

import paddle

import fleetpipe
from fleetpipe import fleet
from fleetpipe.job import attempt_files
from tests import launching, pipelines
from tests.chaos import Struck
from tests.pipelines import CLASSES, FEATURES, batch, pipeline

RANK = int(os.environ.get("PADDLE_TRAINER_ID", "0"))


def supervisor() -> int:
    """The process that has started the one in whose fork the launcher of this rank runs."""
    process = os.getppid()
    for _ in range(2):
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return process


def ask_all() -> None:
    for _ in range(2):
        for process in launching.processes(os.environ[launching.MARK]):
            os.kill(process, signal.SIGTERM)
        time.sleep(0.2)


def layers() -> list[object]:
    describe = fleet.meta_parallel.LayerDesc
    return [
        describe(paddle.nn.Linear, FEATURES, 8),
        describe(paddle.nn.Dropout, 0.5),
        describe(paddle.nn.Linear, 8, 8),
        describe(paddle.nn.Linear, 8, CLASSES),
    ]


def main() -> None:
    steps, *happens = sys.argv[1:]
    pipelines.begin(pp=2, micro_batches=2, timeout=30)
    paddle.seed(7)
    model = pipeline(layers())
    rate = paddle.optimizer.lr.ExponentialDecay(0.01, 0.9)
    adam = paddle.optimizer.Adam(rate, parameters=model.parameters())
    optimizer = fleet.distributed_optimizer(adam)
    folder = os.environ.get("FLEETPIPE_CHECKPOINT_DIR", "own")
    interval = int(os.environ.get("RESUME_WORKER_SAVES", "3"))
    manager = fleetpipe.CheckpointManager(folder, save_interval=interval)
    run = fleetpipe.resume(model, optimizer, lr_scheduler=rate, manager=manager)
    everyone = any(what.endswith("=all") for what in happens)
    loader = paddle.io.DataLoader([*range(100)], batch_size=1, num_workers=1)
    loaded = iter(loader) if everyone else itertools.repeat(None)
    for step in run.steps(int(steps)):
        next(loaded)
        time.sleep(float(os.environ.get("RESUME_WORKER_PAUSE", "0")))
        for what in happens:
            where, _, number = what.partition("=")
            if where != f"{attempt_files.number()}.{RANK}.{step}":
                continue
            if number == "supervisor":
                os.kill(supervisor(), signal.SIGTERM)
            elif number == "all":
                ask_all()
            elif number.isdigit():
                os.kill(os.getpid(), int(number))
            else:
                model.observe(Struck(number))
        loss = model.train_batch(batch(2, seed=step), optimizer, rate)
        sys.stdout.write(f"step {step} {loss.numpy().tobytes().hex()}\n")
        sys.stdout.flush()
    state = model.layers.state.gather()
    told = b"".join(tensor.numpy().tobytes() for tensor in state.values())
    sys.stdout.write(f"bits {hashlib.sha256(told).hexdigest()}\n")
    fleet.shutdown()


if __name__ == "__main__":
    main()
