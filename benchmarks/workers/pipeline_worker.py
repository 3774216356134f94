"""A process that ``pipeline.py`` measures: a rank of the pipeline, or a single process.

It trains when it is told to, so that several kinds of process can be measured in turn.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from multiprocessing.connection import Client
from typing import Any

import paddle
from paddle import nn

from benchmarks.figures import started, wrapped
from benchmarks.workers import gpt, idle
from fleetpipe import fleet
from fleetpipe.dygraph import PipelineParallel
from fleetpipe.fleet.meta_parallel import PipelineLayer


def pipelined(case: gpt.Case) -> tuple[PipelineParallel, Callable[[], Any]]:
    """Returns this rank's part of the case in a 1F1B pipeline, and what trains a batch there."""
    started(case.ranks, case.micro_batches, case.rows)
    model, optimizer = wrapped(case.layers(), nn.MSELoss())
    batch = case.batch()
    return model, lambda: model.train_batch(batch, optimizer)


def single_step(case: gpt.Case) -> Callable[[], Any]:
    """Returns what trains one batch of the same micro-batches in plain Paddle."""
    model = PipelineLayer(case.layers(), num_stages=1).single_model()
    optimizer = paddle.optimizer.Adam(1e-4, parameters=model.parameters())
    criterion = nn.MSELoss()
    inputs, targets = case.batch()

    def step() -> Any:
        total = None
        for index in range(case.micro_batches):
            rows = slice(index * case.rows, (index + 1) * case.rows)
            loss = criterion(model(inputs[rows]), targets[rows]) / case.micro_batches
            loss.backward()
            loss = loss.detach()
            total = loss if total is None else total + loss
        optimizer.step()
        optimizer.clear_grad()
        return total

    return step


def timed(step: Callable[[], Any], steps: int) -> dict[str, Any]:
    """Returns seconds and processor seconds of one step, and the bits of every loss."""
    losses = []
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(steps):
        losses.append(float(step()).hex())
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    return {"seconds": wall / steps, "processor": processor / steps, "losses": losses}


def main() -> None:
    """Serves ``pipeline.py``: (command, number) comes in, a dict goes back, until "stop"."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=["pipeline", "single"])
    parser.add_argument("case", type=json.loads, help="its attributes, as JSON")
    parser.add_argument("address")
    arguments = parser.parse_args()
    paddle.set_device("cpu")
    case = gpt.Case(**arguments.case)
    model, step = pipelined(case) if arguments.kind == "pipeline" else (None, single_step(case))
    with Client(arguments.address, "AF_UNIX") as driver:
        driver.send(0 if model is None else model.stage_id)
        while True:
            command, number = driver.recv()
            if command == "stop":
                break
            if command == "train":
                driver.send(timed(step, number))
            elif command == "held":
                driver.send({} if model is None else model.peak_held)
            else:
                driver.send(idle.over_sockets(case, number))
    fleet.shutdown()


if __name__ == "__main__":
    main()
