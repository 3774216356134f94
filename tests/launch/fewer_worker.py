"""Trains where a place is broken for a while: ``fewer_worker.py STEPS PP FILE``.

While FILE is there, the last of all ranks dies before step 3. The first rank of a job with fewer
ranks removes it, and takes its time. Replicas fill the ranks that PP leaves: each takes its part of
the batch, and sums are a tree.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import paddle

import fleetpipe
from fleetpipe import fleet
from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer
from tests import pipelines
from tests.byhand import kill_now
from tests.pipelines import CLASSES, FEATURES, adam, batch


def main() -> None:
    steps, pp, broken = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    rank, ranks = (int(os.environ.get(f"PADDLE_{n}", d)) for n, d in _TOLD)
    whole = os.environ.get("FLEETPIPE_WHOLE_SIZE", str(ranks))
    replicas = 1 if pp > 2 else max(1, ranks // pp)
    degrees = {"pp": pp} if pp > 2 else {"pp": pp, "dp": -1}
    options = {} if pp > 2 else {"sums": "tree"}
    strategy = pipelines.strategy(4 // replicas, own={**options, "timeout": 30}, **degrees)
    fleet.init(is_collective=True, strategy=strategy)
    paddle.seed(7)
    middle = [LayerDesc(paddle.nn.Linear, 8, 8), LayerDesc(paddle.nn.Dropout, 0.5)]
    ends = LayerDesc(paddle.nn.Linear, FEATURES, 8), LayerDesc(paddle.nn.Linear, 8, CLASSES)
    layers = [ends[0], *middle, *middle, ends[1]]
    described = PipelineLayer(layers, num_stages=pp, loss_fn=paddle.nn.CrossEntropyLoss())
    model = fleet.distributed_model(described)
    optimizer = adam(model)
    run = fleetpipe.resume(model, optimizer)
    for step in run.steps(steps):
        if step >= 3 and ranks == int(whole) > 1 and rank == ranks - 1 and broken.exists():
            kill_now()
        if ranks < int(whole):
            time.sleep(0.3)  # until it is asked to end for the sake of all
            broken.unlink(missing_ok=True)
        place = model.replicas.rank
        rows = [tensor.chunk(replicas)[place] for tensor in batch(4, seed=step)]
        loss = model.train_batch(rows, optimizer)
        sys.stdout.write(f"step {step} {ranks} {loss.numpy().tobytes().hex()}\n")
        sys.stdout.flush()
    sys.stdout.write(f"bits {fleetpipe.model_hash(model)}\n")
    fleet.shutdown()


_TOLD = (("TRAINER_ID", "0"), ("TRAINERS_NUM", "1"))

if __name__ == "__main__":
    main()
