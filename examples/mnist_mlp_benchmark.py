"""What a pipeline gains: one multilayer perceptron under several schedules, as a table.

    make benchmark-mnist
    python -m fleetpipe run --nproc 2 examples/mnist_mlp_benchmark.py --data MNIST
    python examples/mnist_mlp_benchmark.py --hidden 64 --epochs 2

In the row "sequential" each micro-batch finishes before the next begins: one rank works at a time.
Every row trains the same weights on the same batches: losses and accuracy must be equal, and the
program fails where they are not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
from dygraph_mlp import MLP
from images import mnist_or_digits
from paddle import nn

import fleetpipe
from fleetpipe import fleet

#: Rows of the table: the schedule, and the chunks of each rank.
MODES = {"sequential": 1, "FThenB": 1, "1F1B": 1, "Interleaved1F1B": 2}


class Row(NamedTuple):
    """What the table shows of a schedule."""

    images_per_second: float
    train_loss: float
    test_loss: float
    accuracy: float


class Clock(paddle.callbacks.Callback):
    """Takes the time of all epochs but the first, and the losses of the last."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds, self.images, self.epoch = 0.0, 0, 0
        self.losses: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch, self.losses = epoch, []
        self.begun = time.perf_counter()

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        self.losses += logs["loss"]
        if self.epoch:
            self.images += logs["batch_size"]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch:
            self.seconds += time.perf_counter() - self.begun


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A multilayer perceptron under several schedules.")
    parser.add_argument("--epochs", type=int, default=6, help="the first is not timed; at least 2")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--micro-batch-size", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=1024, help="width of the 8 hidden layers")
    parser.add_argument("--data", type=Path, help="folder with MNIST's .gz files; default: digits")
    parser.add_argument("--report", type=Path, help="write the table as JSON")
    return parser.parse_args()


def measured(schedule: str, args: Any, train: Any, test: Any) -> Row:
    """Trains under one schedule, in a job of its own. Collective."""
    world = int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": world if world > 1 else 2}
    strategy.pipeline_configs = {
        "accumulate_steps": args.batch_size // args.micro_batch_size,
        "micro_batch_size": args.micro_batch_size,
        "schedule_mode": schedule,
    }
    fleet.init(is_collective=True, strategy=strategy)
    topology = fleet.get_hybrid_communicate_group().topology()
    chunks = MODES[schedule]
    network = MLP(args.hidden, topology=topology, num_virtual_pipeline_stages=chunks)
    model = fleetpipe.Model(network)
    adam = paddle.optimizer.Adam(1e-3, parameters=model.parameters())
    model.prepare(adam, nn.CrossEntropyLoss(), paddle.metric.Accuracy())
    clock = Clock()
    if model.is_rank("first"):
        print(f"training under {schedule}", flush=True)
    options = {"batch_size": args.batch_size, "drop_last": True, "verbose": 1}
    model.fit(train, epochs=args.epochs, callbacks=clock, **options)
    found = model.evaluate(test, batch_size=len(test), verbose=0)
    fleet.shutdown()
    loss = sum(clock.losses) / len(clock.losses)
    return Row(clock.images / clock.seconds, loss, found["loss"][0], float(found["acc"]))


def table(rows: dict[str, Row]) -> str:
    """Returns the rows as text, with the speed beside that of the first."""
    first = next(iter(rows.values())).images_per_second
    lines = [f"{'schedule':16} {'images/s':>9}         train loss  test loss  accuracy"]
    for mode, row in rows.items():
        speed = f"{row.images_per_second:9.0f} {row.images_per_second / first:5.2f}x"
        losses = f"{row.train_loss:10.6f} {row.test_loss:10.6f}"
        lines.append(f"{mode:16} {speed}  {losses} {row.accuracy:9.4f}")
    return "\n".join(lines)


def main() -> int:
    args = options()
    images, labels, name = mnist_or_digits(args.data)
    held_out = len(images) // 6
    train, test = (
        paddle.io.TensorDataset([paddle.to_tensor(images[part]), paddle.to_tensor(labels[part])])
        for part in (np.s_[held_out:], np.s_[:held_out])
    )
    rows = {mode: measured(mode, args, train, test) for mode in MODES}
    equal = len({row[1:] for row in rows.values()}) == 1
    if os.environ.get("PADDLE_TRAINER_ID", "0") == "0":
        print(f"{name}: {len(train)} images to train on, {args.epochs} epochs; {held_out} to test")
        print(table(rows))
        print("losses and accuracy are equal" if equal else "losses or accuracy differ", flush=True)
        if args.report:
            found = {mode: row._asdict() for mode, row in rows.items()}
            args.report.write_text(
                json.dumps({"data": name, "rows": found}, indent=1) + "\n", encoding="utf-8"
            )
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
