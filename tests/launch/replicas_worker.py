"""Trains on as many replicas as there are processes: ``replicas_worker.py STEPS FOLDER``.

A batch of all replicas together has the same samples, whatever their number; what each rank took
of it in a step is noted in a file in FOLDER.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import paddle

import fleetpipe
from fleetpipe import fleet
from fleetpipe.io import DistributedBatchSampler
from tests import pipelines
from tests.pipelines import CLASSES, FEATURES, pipeline, sgd

#: Samples of an epoch, and of a step of all replicas.
SAMPLES, TOGETHER = 44, 8


class Numbers(paddle.io.Dataset):  # type: ignore[misc]
    """Samples that are a row of numbers and a class each, and know their own number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[np.ndarray, int, int]:
        row = np.random.default_rng(index).standard_normal(FEATURES)
        return row.astype("float32"), index % CLASSES, index


def main() -> None:
    steps, folder = int(sys.argv[1]), Path(sys.argv[2])
    replicas = int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))
    rows = TOGETHER // replicas
    pipelines.begin(dp=replicas, micro_batches=rows // pipelines.ROWS, timeout=30)
    paddle.seed(7)
    model = pipeline()
    optimizer = sgd(model)
    numbers = Numbers()
    sampler = DistributedBatchSampler(numbers, rows, shuffle=True, seed=3)
    manager = fleetpipe.CheckpointManager(
        os.environ.get("FLEETPIPE_CHECKPOINT_DIR", "own"), save_interval=1, max_to_keep=2
    )
    run = fleetpipe.resume(model, optimizer, data=sampler, manager=manager)
    batches = iter(sampler)
    for step in run.steps(steps):
        chosen = next(batches, None)
        if chosen is None:
            batches = iter(sampler)
            chosen = next(batches)
        inputs, labels, own = zip(*(numbers[index] for index in chosen))
        data = [paddle.to_tensor(np.stack(inputs)), paddle.to_tensor([[one] for one in labels])]
        loss = model.train_batch(data, optimizer).item()
        rank = os.environ.get("PADDLE_TRAINER_ID", "0")
        took = {"step": step, "replicas": replicas, "samples": own, "loss": loss}
        file = folder / f"took-{step:03d}-{rank}"
        file.write_text(json.dumps(took))
    state = {name: value.numpy().tolist() for name, value in model.state_dict().items()}
    (folder / "state.json").write_text(json.dumps(state))
    fleet.shutdown()


if __name__ == "__main__":
    main()
