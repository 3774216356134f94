"""One of the ranks of a job over several hosts: ``hosts_worker.py [PP STEPS]``.

It notes each step in a file of its working directory, and what it found at the end, as JSON.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

import paddle

from fleetpipe.errors import FleetPipeError
from fleetpipe.job.job import current_job
from tests.pipelines import batch, job, pipeline, sgd

PAUSE_SECONDS = 0.05


def train(steps: int, rank: str = "") -> tuple[list[float], float]:
    """Trains, replicas with data of their own; returns the losses, and the longest step."""
    paddle.seed(7)
    model = pipeline()
    optimizer = sgd(model)
    losses, longest = [], 0.0
    for step in range(steps):
        since = time.monotonic()
        loss = model.train_batch(batch(seed=2 * step + current_job().replica), optimizer)
        losses.append(float(loss))
        if rank:
            time.sleep(PAUSE_SECONDS)
            Path(f"step{step}.{rank}").write_text(f"{time.monotonic()}\n")
        longest = max(longest, time.monotonic() - since)
    return losses, longest


def main(pp: int = 2, steps: int = 3) -> None:
    """Adds up over Gloo, trains over sockets, and reports."""
    with job(pp, dp=-1, timeout=float(os.environ.get("HOSTS_TIMEOUT", "30"))):
        total = paddle.ones([3])
        paddle.distributed.all_reduce(total)
        connections = current_job()._connections._connections.values()
        sockets = [connection._sock for connection in connections]
        others = [sock.getpeername()[0] for sock in sockets if sock.family != socket.AF_UNIX]
        sealed = all(connection._seal is not None for connection in connections)
        rank = os.environ["PADDLE_TRAINER_ID"]
        try:
            losses, longest = train(steps, rank)
        except FleetPipeError:
            Path(f"told.{rank}").write_text(f"{time.monotonic()}\n")
            raise
    report = {
        "losses": losses,
        "longest": longest,
        "others": sorted(others),
        "sealed": sealed,
        "total": total.tolist(),
        "named": socket.gethostbyname(socket.gethostname()),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
    }
    Path(f"report.{rank}").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
