"""A residual network on CIFAR-10, or on digits of its size, with the loop of ``fleetpipe.Model``.

    python examples/resnet_cifar.py --layers 18 --width 8 --epochs 3
    python -m fleetpipe launch --nproc_per_node 2 examples/resnet_cifar.py --data CIFAR.tar.gz

The network knows of no pipeline: it is captured and cut where its slowest stage is fastest. It
prints the loss every so many batches, and evaluates each epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import zlib  # noqa: F401  # first: paddlepaddle 2.6.2 brings one that Python cannot use
from pathlib import Path
from typing import Any

import paddle
import resnet
from images import cifar10, digits, held_out
from paddle.static import InputSpec

import fleetpipe
from fleetpipe import fleet
from fleetpipe.callbacks import LogMetricByEpoch, LossMonitor


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A ResNet with fleetpipe.Model.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, help="most batches to train on")
    parser.add_argument("--pp", type=int, help="stages; default: the processes, or 2 in one")
    parser.add_argument("--schedule", default="1F1B", help="schedule by name, e.g. FThenB")
    parser.add_argument("--batch-size", type=int, default=32, help="rows of a batch")
    parser.add_argument("--micro-batches", type=int, default=4, help="of a batch")
    parser.add_argument("--layers", type=int, default=50, choices=sorted(resnet.DEPTHS))
    parser.add_argument("--width", type=int, default=64, help="channels of the stem")
    parser.add_argument("--rate", type=float, default=0.003, help="learning rate of Adam")
    parser.add_argument("--data", type=Path, help="cifar-10-python.tar.gz; default: digits")
    parser.add_argument("--save-dir", help="folder of checkpoints, from which a run goes on")
    parser.add_argument("--report", type=Path, help="write losses and accuracy as JSON")
    args = parser.parse_args()
    world = int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))
    args.pp = args.pp or (world if world > 1 else 2)
    return args


class Told(paddle.callbacks.Callback):
    """Keeps the losses of the training and what the evaluations found."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.accuracies: list[float] = []

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        self.losses += logs["loss"]

    def on_eval_end(self, logs: Any = None) -> None:
        self.accuracies.append(float(logs["acc"]))


def main() -> int:
    args = options()
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": args.pp}
    strategy.pipeline_configs = {
        "accumulate_steps": args.micro_batches,
        "micro_batch_size": max(args.batch_size // args.micro_batches, 1),
        "schedule_mode": args.schedule,
    }
    fleet.init(is_collective=True, strategy=strategy)
    paddle.seed(0)
    images, labels, name = cifar10(args.data) if args.data else digits(4, 3)
    train, test = held_out(images, labels)
    network = resnet.ResNet(args.layers, args.width)
    model = fleetpipe.Model(network, [InputSpec([None, 3, 32, 32], "float32", "image")])
    first = model.network.global_rank == 0
    if first:
        print(f"data: {name}, {len(train)} images to train on, {len(test)} to evaluate")
        print(model.network.stage_table(), flush=True)
    adam = paddle.optimizer.Adam(args.rate, parameters=model.parameters())
    model.prepare(adam, paddle.nn.CrossEntropyLoss(), paddle.metric.Accuracy())
    told = Told()
    model.fit(
        train,
        test,
        batch_size=args.batch_size,
        epochs=args.epochs,
        num_iters=args.steps,
        save_dir=args.save_dir,
        resume="auto" if args.save_dir else None,
        verbose=0,
        callbacks=[LossMonitor(10), LogMetricByEpoch(), told],
    )
    if args.report and first:
        report = {
            "losses": told.losses,
            "accuracy": told.accuracies[-1],
            "ranks": args.pp,
            "schedule": model.pipeline.schedule.name,
            "paddle": paddle.__version__,
            "data": name,
        }
        args.report.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    fleet.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
