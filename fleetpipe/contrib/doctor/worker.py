"""The program of a rank of ``fleetpipe doctor``: it measures each transport and compares bits."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
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

#: Seconds that any wait for another rank may last.
TIMEOUT = 20.0
#: The bytes of each measured message, and its number of round trips.
SIZES = {4: 200, 1 << 20: 40, 16 << 20: 8}
#: Of the training: the model's width, rows of a micro-batch, micro-batches of a step, and steps.
WIDTH, ROWS, MICRO_BATCHES, STEPS = 64, 4, 4, 3
#: The messages of a round trip: from rank 0 to rank 1, and back.
_OUTWARD, _RETURN = MessageKey("F", 0, 1, "doctor", 0), MessageKey("B", 0, 1, "doctor", 0)


def begin_job(transport: str | None = None) -> Job:
    """Begins a job whose ranks form one pipeline, and returns it. Collective.

    Args:
        transport: The transport between ranks, by name; None for the one that fleetpipe chooses.
    """
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": int(os.environ["PADDLE_TRAINERS_NUM"])}
    configs = {"accumulate_steps": MICRO_BATCHES, "micro_batch_size": ROWS}
    strategy.pipeline_configs = configs
    strategy.fleetpipe_configs = {"timeout": TIMEOUT, "transport": transport}
    fleet.init(is_collective=True, strategy=strategy)
    return cast("Job", current_job())


def one_way_seconds(transport: Transport, nbytes: int, trips: int) -> float:
    """Measures round trips between ranks 0 and 1; other ranks do nothing.

    Args:
        transport: Connects the ranks of the pipeline.
        nbytes: Bytes of a message.
        trips: The number of round trips.

    Returns:
        The median of half a round trip, in seconds; 0 on other ranks.
    """
    tensor = paddle.ones([nbytes // 4], "float32")
    times = []
    for _ in range(trips if transport.rank < 2 else 0):
        start = time.perf_counter()
        if transport.rank == 0:
            transport.send(1, _OUTWARD, tensor)
            transport.receive(1, _RETURN, TIMEOUT)
        else:
            transport.send(0, _RETURN, transport.receive(0, _OUTWARD, TIMEOUT))
        synchronize()
        times.append((time.perf_counter() - start) / 2)
    return statistics.median(times) if times else 0.0


def measure_transport(name: str, job: Job) -> dict[str, float]:
    """Returns the seconds of a message one way over a transport, by its bytes. Collective."""
    (transport,) = job.connect().values()
    with job.guarded(lambda: f"measuring {name}"):
        return {str(n): one_way_seconds(transport, n, k) for n, k in SIZES.items()}


def compare_with_one_device(job: Job) -> dict[str, Any]:
    """Trains a small model beside its single-device model, and compares them. Collective.

    Returns:
        Under "passed" whether all bits are equal, and under "verdict" a text.
    """
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
        session.step([paddle.randn([MICRO_BATCHES * ROWS, WIDTH]) for _ in range(2)])
    return {"passed": session.report.passed, "verdict": session.report.verdict()}


def main() -> None:
    """Measures both transports and compares bits; rank 0 writes the results into a JSON file.

    It writes them after each measurement, since a later one may hang. The first argument of the
    program names the file. The result of a measurement that fails has the error's text under
    "error", and under "refused" whether it is a ConfigError.
    """
    file, results = Path(sys.argv[1]), {}
    measurements: dict[str, tuple[str | None, Callable[[Job], dict[str, Any]]]] = {
        **{name: (name, partial(measure_transport, name)) for name in (SOCKETS, PROCESS_GROUP)},
        "parity": (None, compare_with_one_device),
    }
    for name, (transport, measure) in measurements.items():
        try:
            job = begin_job(transport)
            try:
                results[name] = measure(job)
            finally:
                fleet.shutdown()
        except FleetPipeError as error:
            results[name] = {"error": str(error), "refused": isinstance(error, ConfigError)}
        if os.environ["PADDLE_TRAINER_ID"] == "0":
            file.write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
