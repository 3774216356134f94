"""One of two ranks on two hosts: steps of a pipeline over sockets, and a sum over Gloo.

It writes what it found into a file of its working directory, as JSON.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import paddle

from fleetpipe.job.job import current_job
from tests.pipelines import batch, job, pipeline, sgd


def main() -> None:
    """Trains for three steps."""
    with job(2, timeout=30):
        total = paddle.ones([3])
        paddle.distributed.all_reduce(total)
        paddle.seed(7)
        model = pipeline()
        optimizer = sgd(model)
        sealed = all(c._seal is not None for c in current_job()._connections._connections.values())
        losses = [float(model.train_batch(batch(), optimizer)) for _ in range(3)]
    report = {
        "losses": losses,
        "sealed": sealed,
        "total": total.tolist(),
        "named": socket.gethostbyname(socket.gethostname()),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
    }
    Path(f"report.{os.environ['PADDLE_TRAINER_ID']}").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
