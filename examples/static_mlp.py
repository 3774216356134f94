"""A multilayer perceptron as a static-graph pipeline of any number of stages.

    python -m paddle.distributed.launch --nproc_per_node 2 examples/static_mlp.py
    python -m paddle.distributed.launch --nproc_per_node 4 examples/static_mlp.py --dp 2
    python examples/static_mlp.py --pp 3 --report report.json

With ``--report`` the same network is trained as one program, too, and compared.
"""

from __future__ import annotations

import sys
import zlib  # noqa: F401  # first: paddlepaddle 2.6.2 brings one that Python cannot use
from collections.abc import Sequence
from functools import partial
from typing import Any

import paddle
import static_support as support
from images import digits
from paddle import nn
from paddle.static import device_guard

from fleetpipe import fleet

HIDDEN, PIXELS, CLASSES = 64, 64, 10


def build(stages: int) -> Sequence[Any]:
    """Builds the network in the default program; returns the loss and the accuracy."""
    with device_guard("gpu:0"):
        image = paddle.static.data("image", [-1, 1, 8, 8])
        label = paddle.static.data("label", [-1, 1], "int64")
        value = paddle.flatten(image, 1)
    width = PIXELS
    for stage in range(stages):
        with device_guard(f"gpu:{stage}"):
            value = nn.functional.relu(nn.Linear(width, HIDDEN)(value))
            width = HIDDEN
    with device_guard(f"gpu:{stages - 1}"):
        logits = nn.Linear(width, CLASSES)(value)
        loss = nn.functional.cross_entropy(logits, label)
        accuracy = paddle.static.accuracy(nn.functional.softmax(logits), label)
    return loss, accuracy


def main() -> int:
    parser = support.options("A multilayer perceptron in a static-graph pipeline.", steps=20)
    parser.add_argument("--dp", type=int, default=1, help="replicas of the pipeline")
    parser.add_argument("--pp", type=int, help="stages; default: all ranks of a replica")
    args = parser.parse_args()
    stages = args.pp or max(support.WORLD // args.dp, 2)
    images, labels, data_name = digits(scale=1, channels=1)
    print(f"data: {data_name}, {len(images)} images")

    paddle.enable_static()
    paddle.seed(2026)
    fleet.init(is_collective=True)
    strategy = support.strategy(args)
    loss, accuracy = build(stages)
    make = partial(paddle.optimizer.Adam, 0.003)
    fleet.distributed_optimizer(make(), strategy).minimize(loss)

    exe = paddle.static.Executor(paddle.CPUPlace())
    exe.run(paddle.static.default_startup_program())
    micro_batches = args.accumulate_steps * args.dp
    compared = None
    if args.report:
        compared = support.Comparison(partial(build, stages), make, micro_batches)
    rows = args.accumulate_steps * args.micro_batch_size
    replica = fleet.get_hybrid_communicate_group().get_data_parallel_rank()
    for step, whole in enumerate(support.batches(images, labels, rows * args.dp, args.steps)):
        feed = {name: array[replica * rows : (replica + 1) * rows] for name, array in whole.items()}
        found = exe.run(feed=feed, fetch_list=[loss, accuracy])
        if compared is not None:
            compared.step(whole, found[0])
        print(f"step {step}: loss {found[0]}, accuracy {found[1]}")

    passed = compared is None or compared.finish(
        args.report,
        statistics=args.dp == 1,
        ranks=stages,
        dp=args.dp,
        schedule=args.schedule,
        data=data_name,
    )
    fleet.shutdown()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
