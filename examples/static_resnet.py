"""ResNet as a static-graph pipeline of four stages, as Fleet's document has it.

    python -m paddle.distributed.launch --nproc_per_node 4 examples/static_resnet.py
    python examples/static_resnet.py --layers 18 --width 8 --steps 3 --report report.json

Stem and res2 are stage 0, res3 is stage 1, res4 is stage 2, res5, the pool and the last layer are
stage 3. Only the rank of the last stage has a loss; on the others it is None.
"""

from __future__ import annotations

import sys
import zlib  # noqa: F401  # first: paddlepaddle 2.6.2 brings one that Python cannot use
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import paddle
import static_support as support
from images import cifar10, digits
from paddle import nn
from paddle.static import device_guard

from fleetpipe import fleet

#: Blocks of res2 to res5, and whether they are bottlenecks.
DEPTHS = {
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
    101: ((3, 4, 23, 3), True),
    152: ((3, 8, 36, 3), True),
}
CLASSES = 10


def conv(x: Any, channels: int, size: int, stride: int = 1, act: bool = True) -> Any:
    """A convolution with batch norm, and relu."""
    layer = nn.Conv2D(
        x.shape[1], channels, size, stride=stride, padding=(size - 1) // 2, bias_attr=False
    )
    x = nn.BatchNorm2D(channels)(layer(x))
    return nn.functional.relu(x) if act else x


def block(x: Any, channels: int, stride: int, bottleneck: bool) -> Any:
    """Two convolutions, or three with a narrow one between, around which the input is led."""
    out = channels * 4 if bottleneck else channels
    short = x
    if x.shape[1] != out or stride != 1:
        short = conv(x, out, 1, stride, act=False)
    if bottleneck:
        x = conv(conv(x, channels, 1), channels, 3, stride)
        x = conv(x, out, 1, act=False)
    else:
        x = conv(conv(x, channels, 3, stride), channels, 3, act=False)
    return nn.functional.relu(x + short)


def net(image: Any, layers: int, width: int) -> tuple[Any, int]:
    """Returns the logits and the stage that they are made in."""
    counts, bottleneck = DEPTHS[layers]
    with device_guard("gpu:0"):
        x = conv(image, width, 7, 2)
        x = nn.functional.max_pool2d(x, 3, 2, 1)
    offset = 0
    for offset, count in enumerate(counts):
        with device_guard(f"gpu:{offset}"):
            for index in range(count):
                stride = 2 if index == 0 and offset != 0 else 1
                x = block(x, width << offset, stride, bottleneck)
    with device_guard(f"gpu:{offset}"):
        x = nn.functional.adaptive_avg_pool2d(x, 1)
        x = nn.Linear(x.shape[1], CLASSES)(paddle.flatten(x, 1))
    return x, offset


def build(layers: int, width: int) -> Sequence[Any]:
    """Builds the network in the default program; returns loss, acc1 and acc5."""
    with device_guard("gpu:0"):
        image = paddle.static.data("image", [-1, 3, 32, 32])
        label = paddle.static.data("label", [-1, 1], "int64")
    logits, offset = net(image, layers, width)
    with device_guard(f"gpu:{offset}"):
        out = nn.functional.softmax(logits)
        loss = nn.functional.cross_entropy(logits, label)
        acc1 = paddle.static.accuracy(out, label, k=1)
        acc5 = paddle.static.accuracy(out, label, k=5)
    return loss, acc1, acc5


def optimizer() -> Any:
    return paddle.optimizer.Momentum(
        learning_rate=0.1, momentum=0.9, weight_decay=paddle.regularizer.L2Decay(1e-4)
    )


def shown(value: Any) -> str:
    """A fetched value as the document logs it; None on the ranks that do not own it."""
    return "None" if value is None else f"{float(value):.5f}"


def main() -> int:
    parser = support.options("ResNet in a static-graph pipeline of four stages.", steps=20)
    parser.add_argument("--layers", type=int, default=50, choices=sorted(DEPTHS), help="depth")
    parser.add_argument("--width", type=int, default=64, help="channels of the stem")
    parser.add_argument("--data", type=Path, help="cifar-10-python.tar.gz; default: digits")
    args = parser.parse_args()
    images, labels, data_name = cifar10(args.data) if args.data else digits(4, 3)
    print(f"data: {data_name}, {len(images)} images")

    paddle.enable_static()
    paddle.seed(2026)
    fleet.init(is_collective=True)
    strategy = support.strategy(args)
    loss, acc1, acc5 = build(args.layers, args.width)
    fleet.distributed_optimizer(optimizer(), strategy).minimize(loss)

    exe = paddle.static.Executor(paddle.CPUPlace())
    exe.run(paddle.static.default_startup_program())
    compared = None
    if args.report:
        whole = partial(build, args.layers, args.width)
        compared = support.Comparison(whole, optimizer, args.accumulate_steps)
    rows = args.accumulate_steps * args.micro_batch_size
    epoch = max(len(images) // rows, 1)
    for step, feed in enumerate(support.batches(images, labels, rows, args.steps)):
        found = exe.run(feed=feed, fetch_list=[loss, acc1, acc5])
        if compared is not None:
            compared.step(feed, found[0])
        print(
            f"[Epoch {step // epoch}, batch {step % epoch}] "
            "loss: {}, acc1: {}, acc5: {}".format(*map(shown, found)),
            flush=True,
        )
    passed = compared is None or compared.finish(
        args.report, statistics=True, ranks=4, dp=1, schedule=args.schedule, data=data_name
    )
    fleet.shutdown()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
