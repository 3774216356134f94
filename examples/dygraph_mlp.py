"""ms-pipeline-parallel's benchmark: a multilayer perceptron on handwritten digits, in a pipeline.

    python -m paddle.distributed.launch --nproc_per_node 2 examples/dygraph_mlp.py --mode 1F1B
    python -m paddle.distributed.launch --nproc_per_node 4 examples/dygraph_mlp.py --dp 2 --report r
    python examples/dygraph_mlp.py --hidden 64 --steps 100

With ``--report`` or ``--parity`` a single device trains beside it and every bit is compared;
without, the images per second are those of the pipeline alone.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import support
from images import mnist_or_digits
from paddle import nn
from paddle.nn import functional as F

from fleetpipe import fleet
from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer
from fleetpipe.io import DistributedBatchSampler
from fleetpipe.schedules import Action, Placement, register

HIDDEN_LAYERS, CLASSES, LOGGED_EVERY = 8, 10, 20


def sequential(placement: Placement, micro_batches: int) -> list[list[Action]]:
    """Each micro-batch finishes forward and backward on all ranks before the next begins."""
    return [
        [Action(kind, stage, k) for k in range(micro_batches) for kind in "FB"]
        for stage in range(placement.ranks)
    ]


# A schedule of one's own is a function: from here on it has a name, and is verified like any other.
register("sequential", sequential)


class MLP(PipelineLayer):
    """Flatten, hidden layers with ReLU, and ten logits."""

    def __init__(self, hidden: int, **kwargs: Any) -> None:
        layers: list[Any] = [LayerDesc(nn.Flatten)]
        for inputs in [28 * 28, *[hidden] * (HIDDEN_LAYERS - 1)]:
            layers += [LayerDesc(nn.Linear, inputs, hidden), F.relu]
        layers.append(LayerDesc(nn.Linear, hidden, CLASSES))
        super().__init__(layers=layers, loss_fn=nn.CrossEntropyLoss(), **kwargs)


def batches(sampler: Any, images: np.ndarray, labels: np.ndarray) -> Iterator[list[Any]]:
    """Yields the batches [images, labels] of this rank's replica, epoch after epoch."""
    while True:
        for rows in sampler:
            yield [paddle.to_tensor(images[rows]), paddle.to_tensor(labels[rows])]


def train(step: Any, data: Iterator[list[Any]], epoch: int, telling: bool) -> float:
    """Trains on all batches of ``data``; returns the seconds of all but the first."""
    start = begin = time.perf_counter()
    for number, batch in enumerate(data, 1):
        loss = step(batch)
        now = time.perf_counter()
        if number == 1:
            start = now
        if telling and number % LOGGED_EVERY == 0:
            done = f"epoch {(number - 1) // epoch}, iteration {number}"
            print(f"{done}: loss {float(loss):.4f}, {now - begin:.2f} s", flush=True)
            begin = now
    return time.perf_counter() - start


def accuracy(model: Any, images: np.ndarray, labels: np.ndarray) -> float:
    """Returns the share of images told right, on the owner of the last stage. Collective."""
    size = model.accumulate_steps * model.micro_batch_size
    right = 0
    for start in range(0, len(images), size):
        # The last batch is filled up with the first images, whose answers are not counted again.
        rows = np.arange(start, start + size) % len(images)
        outputs = model.eval_batch([paddle.to_tensor(images[rows]), None])
        if outputs:
            told = np.concatenate([output.numpy().argmax(axis=1) for output in outputs])
            right += int((told == labels[rows, 0])[: len(images) - start].sum())
    return right / len(images)


def options() -> Any:
    world = int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))
    parser = support.options("A multilayer perceptron in a pipeline.", steps=None)
    parser.add_argument(
        "--mode",
        dest="schedule",
        choices=["sequential", "FThenB", "1F1B"],
        help="the benchmark's own names for --schedule",
    )
    parser.add_argument("--epochs", type=int, default=30, help="where --steps does not say it")
    parser.add_argument("--dp", type=int, default=1, help="replicas of the pipeline")
    parser.add_argument("--pp", type=int, help="pipeline ranks; default: world / dp")
    parser.add_argument("--batch-size", type=int, default=32, help="images of one replica's batch")
    parser.add_argument("--micro-batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--loss-reduction", choices=["mean", "sum"], default="mean")
    parser.add_argument("--hidden", type=int, default=1024, help="width of the hidden layers")
    parser.add_argument("--parity", action="store_true", help="compare with a single device")
    parser.add_argument(
        "--tolerance",
        type=float,
        help="largest relative difference that passes; default: 0, and 1e-5 with --dp, because "
        "replicas add up in another order and Adam enlarges what that changes, more in each step",
    )
    parser.add_argument("--data", type=Path, help="folder with MNIST's .gz files")
    args = parser.parse_args()
    args.pp = args.pp or (world // args.dp if world > 1 else 2)
    args.parity = args.parity or args.report is not None
    if args.tolerance is None:
        args.tolerance = 0.0 if args.dp == 1 else 1e-5
    return args


def pipeline(args: Any) -> Any:
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": args.dp, "mp_degree": 1, "pp_degree": args.pp}
    strategy.pipeline_configs = {
        "accumulate_steps": args.batch_size // args.micro_batch_size,
        "micro_batch_size": args.micro_batch_size,
        "schedule_mode": args.schedule,
    }
    strategy.fleetpipe_configs = {"loss_reduction": args.loss_reduction, "trace": args.trace}
    fleet.init(is_collective=True, strategy=strategy)
    topology = fleet.get_hybrid_communicate_group().topology()
    layers = MLP(args.hidden, topology=topology)
    print(layers.stage_table())
    return fleet.distributed_model(layers)


def main() -> int:
    args = options()
    images, labels, data_name = mnist_or_digits(args.data)
    trained = len(images) - len(images) // 6
    print(f"data: {data_name}, {trained} images, {len(images) - trained} more to test")
    model = pipeline(args)
    optimizer = fleet.distributed_optimizer(
        paddle.optimizer.Adam(args.learning_rate, parameters=model.parameters())
    )
    compared = None
    if args.parity:
        make = functools.partial(paddle.optimizer.Adam, args.learning_rate)
        compared = support.Comparison(model, optimizer, make, args.tolerance)

    sampler = DistributedBatchSampler(images[:trained], args.batch_size)
    steps = args.steps or args.epochs * len(sampler)
    data = itertools.islice(batches(sampler, images, labels), steps)
    replica = fleet.get_hybrid_communicate_group().get_data_parallel_rank()
    telling = model.is_pipeline_last_stage() and replica == 0
    step = compared.step if compared else lambda batch: model.train_batch(batch, optimizer)
    seconds = train(step, data, len(sampler), telling)

    correct = accuracy(model, images[trained:], labels[trained:])
    if telling:
        if steps > 1 and not compared:
            speed = args.dp * args.batch_size * (steps - 1) / seconds
            print(f"{args.schedule}: {speed:.0f} images/s")
        print(f"test accuracy: {correct:.4f}", flush=True)
    if compared:
        print(compared.report.verdict(), flush=True)
    if compared and telling:
        support.write_report(
            args.report,
            compared.report,
            whole_batch_loss=compared.whole_batch_loss,
            test_accuracy=correct,
            loss_reduction=args.loss_reduction,
            ranks=args.pp,
            dp=args.dp,
            mp=1,
            schedule=model.schedule.name,
            paddle=paddle.__version__,
            data=data_name,
        )
    fleet.shutdown()
    return 0 if compared is None or compared.report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
