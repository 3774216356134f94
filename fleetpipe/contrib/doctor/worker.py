"""The program of a rank of ``fleetpipe doctor``: it measures each transport and compares bits."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, cast

import paddle
from paddle import nn

from fleetpipe import fleet, parity
from fleetpipe.dygraph import PipelineLayer
from fleetpipe.errors import ConfigError, FleetPipeError
from fleetpipe.job.job import Job, current_job
from fleetpipe.paddle_api.device import synchronize
from fleetpipe.transport import MessageKey, Transport
from fleetpipe.transport.base import PROCESS_GROUP, SOCKETS

TIMEOUT = 20.0
#: The bytes of each measured message, and its number of round trips.
SIZES = {4: 200, 1 << 20: 40, 16 << 20: 8}
WIDTH, ROWS, MICRO_BATCHES, STEPS = 64, 4, 4, 3
_THERE, _BACK = MessageKey("F", 0, 1, "doctor", 0), MessageKey("B", 0, 1, "doctor", 0)


def begin(transport: str | None = None) -> Job:
    """Begins a job of all ranks as one pipeline, and returns it. Collective."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": int(os.environ["PADDLE_TRAINERS_NUM"])}
    configs = {"accumulate_steps": MICRO_BATCHES, "micro_batch_size": ROWS}
    strategy.pipeline_configs = configs
    strategy.fleetpipe_configs = {"timeout": TIMEOUT, "transport": transport}
    fleet.init(is_collective=True, strategy=strategy)
    return cast("Job", current_job())


def one_way_seconds(transport: Transport, nbytes: int, trips: int) -> float:
    """Returns the median of half a round trip between the first two ranks."""
    tensor = paddle.ones([nbytes // 4], "float32")
    times = []
    for _ in range(trips if transport.rank < 2 else 0):
        start = time.perf_counter()
        if transport.rank == 0:
            transport.send(1, _THERE, tensor)
            transport.receive(1, _BACK, TIMEOUT)
        else:
            transport.send(0, _BACK, transport.receive(0, _THERE, TIMEOUT))
        synchronize()
        times.append((time.perf_counter() - start) / 2)
    return statistics.median(times) if times else 0.0


def measure(name: str) -> dict[str, Any]:
    """Returns the seconds of one way by the message's size, or the error. Collective."""
    try:
        job = begin(name)
        try:
            (transport,) = job.connect().values()
            with job.guarded(lambda: f"measuring {name}"):
                return {str(n): one_way_seconds(transport, n, k) for n, k in SIZES.items()}
        finally:
            fleet.shutdown()
    except FleetPipeError as error:
        return {"error": str(error), "refused": isinstance(error, ConfigError)}


def compare() -> dict[str, Any]:
    """Trains a small model beside its single-device model, and compares them. Collective."""
    try:
        begin()
        try:
            paddle.seed(0)
            layers: list[Any] = []
            for _ in range(int(os.environ["PADDLE_TRAINERS_NUM"])):
                layers += [nn.Linear(WIDTH, WIDTH), nn.functional.gelu]
            topology = fleet.get_hybrid_communicate_group().topology()
            net = PipelineLayer(layers, topology=topology, loss_fn=nn.MSELoss())
            model = fleet.distributed_model(net)
            adam = paddle.optimizer.Adam(1e-3, parameters=model.parameters())
            session = parity.begin(model, fleet.distributed_optimizer(adam))
            for _ in range(STEPS):
                rows = [paddle.randn([MICRO_BATCHES * ROWS, WIDTH]) for _ in range(2)]
                session.step(rows)
            return {"passed": session.report.passed, "verdict": session.report.verdict()}
        finally:
            fleet.shutdown()
    except FleetPipeError as error:
        return {"error": str(error)}


def main() -> None:
    """Runs the parts, and writes the results after each of them, since a later one may hang."""
    file, results = Path(sys.argv[1]), {}
    parts = {SOCKETS: lambda: measure(SOCKETS), PROCESS_GROUP: lambda: measure(PROCESS_GROUP)}
    for part, run in {**parts, "parity": compare}.items():
        results[part] = run()
        if os.environ["PADDLE_TRAINER_ID"] == "0":
            file.write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
