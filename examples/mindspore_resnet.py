"""MindSpore's pipeline tutorial: a ResNet on CIFAR-10 with a stage on each of its sublayers.

    python examples/mindspore_resnet.py --layers 18 --width 8 --steps 4 --report report.json
    python -m paddle.distributed.launch --nproc_per_node 4 examples/mindspore_resnet.py --dp 2

The program is the tutorial's, with other imports, Paddle's layers and Paddle's Momentum. With
``--report`` the untouched network is trained beside it, on the same micro-batches.
"""

from __future__ import annotations

import os
import sys
import zlib  # noqa: F401  # first: paddlepaddle 2.6.2 brings one that Python cannot use
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import resnet
import support
from images import cifar10, digits
from paddle.nn import CrossEntropyLoss
from paddle.optimizer import Momentum

from fleetpipe import fleet, parity
from fleetpipe.compat.mindspore import LossMonitor, Model, ParallelMode, context, init, nn
from fleetpipe.io import DistributedBatchSampler


class ResNet(resnet.ResNet, nn.Cell):
    """The network, with the tutorial's stages: what comes before layer3 in the first."""

    def __init__(self, layers: int, width: int, num_classes: int = 10) -> None:
        super().__init__(layers, width, num_classes)

        # pipeline parallel config
        self.conv1.pipeline_stage = 0
        self.bn1.pipeline_stage = 0
        self.layer1.pipeline_stage = 0
        self.layer2.pipeline_stage = 0
        self.layer3.pipeline_stage = 1
        self.layer4.pipeline_stage = 1
        self.fc.pipeline_stage = 1


def options() -> Any:
    world = int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))
    parser = support.options("MindSpore's pipeline tutorial.", steps=20)
    parser.add_argument("--dp", type=int, help="replicas; default: as many as there are processes")
    parser.add_argument("--epochs", type=int, default=1, help="passes over the steps")
    parser.add_argument("--batch-size", type=int, default=32, help="rows of a replica's batch")
    parser.add_argument("--micro-size", type=int, default=2, help="micro-batches of a batch")
    parser.add_argument("--layers", type=int, default=50, choices=sorted(resnet.DEPTHS))
    parser.add_argument("--width", type=int, default=64, help="channels of the stem")
    parser.add_argument("--data", type=Path, help="cifar-10-python.tar.gz; default: digits")
    parser.add_argument("--save-graphs", action="store_true", help="write stages and plan")
    args = parser.parse_args()
    replicas = max(world // 2, 1)
    if args.dp not in (None, replicas):
        parser.error(f"--dp (={args.dp}) must be {world} processes / 2 stages")
    args.dp = replicas
    return args


def create_dataset(args: Any) -> tuple[Iterable[Any], str]:
    """Returns ``--steps`` batches of this rank's replica, and the name of the data."""
    images, labels, name = cifar10(args.data) if args.data else digits(4, 3)
    print(f"data: {name}, {len(images)} images")
    rows = np.arange(args.steps * args.batch_size * args.dp) % len(images)
    columns = [paddle.to_tensor(images[rows]), paddle.to_tensor(labels[rows])]
    dataset = paddle.io.TensorDataset(columns)
    sampler = DistributedBatchSampler(dataset, args.batch_size)
    return paddle.io.DataLoader(dataset, batch_sampler=sampler), name


def main() -> int:
    args = options()
    context.set_auto_parallel_context(
        parallel_mode=ParallelMode.SEMI_AUTO_PARALLEL, gradients_mean=True
    )
    context.set_auto_parallel_context(pipeline_stages=2, save_graphs=args.save_graphs)
    context.set_auto_parallel_context(pipeline_config={"pipeline_scheduler": args.schedule})
    init()
    paddle.seed(2026)
    loss_cb = LossMonitor()
    dataset, data_name = create_dataset(args)
    net = ResNet(args.layers, args.width)
    loss = CrossEntropyLoss()
    net_with_loss = nn.WithLossCell(net, loss)
    net_pipeline = nn.PipelineCell(net_with_loss, args.micro_size)
    opt = Momentum(0.01, 0.9, parameters=net.infer_param_pipeline_stage())
    model = Model(net_pipeline, optimizer=opt)
    model.build(dataset)
    beside = Beside(model, resnet.ResNet(args.layers, args.width)) if args.report else None
    model.train(args.epochs, dataset, callbacks=[loss_cb], dataset_sink_mode=True)

    passed = beside is None or report(beside.session.report, model, args, data_name)
    fleet.shutdown()
    return 0 if passed else 1


class Beside:
    """Stands in the place of the pipeline's ``train_batch``, and trains a plain network beside it.

    Attributes:
        session: Compares them, from the first batch on.
    """

    session: parity.Session

    def __init__(self, model: Model, plain: paddle.nn.Layer) -> None:
        """Takes the model that is built, and the network."""
        self._pipeline, self._plain = model.pipeline, plain
        self._train_batch = model.pipeline.train_batch
        model.pipeline.train_batch = self

    def __call__(self, data: Any, optimizer: Any, **_options: Any) -> Any:
        """Trains both on a batch; returns the pipeline's loss."""
        if not hasattr(self, "session"):
            self.session = parity.begin(
                self._pipeline, optimizer, self._plain, train_batch=self._train_batch
            )
        return self.session.step(data)[1].reshape([1])


def report(found: parity.Report, model: Model, args: Any, data_name: str) -> bool:
    """Prints and writes what the comparison found; returns whether it passes."""
    print(found.verdict(), flush=True)
    hcg = fleet.get_hybrid_communicate_group()
    if model.pipeline.is_pipeline_last_stage() and hcg.get_data_parallel_rank() == 0:
        support.write_report(
            args.report,
            found,
            ranks=2,
            dp=args.dp,
            mp=1,
            schedule=model.pipeline.schedule.name,
            paddle=paddle.__version__,
            data=data_name,
        )
    return found.passed


if __name__ == "__main__":
    sys.exit(main())
