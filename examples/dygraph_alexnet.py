"""AlexNet as a dynamic-graph pipeline, beside the same network on a single device.

    python -m paddle.distributed.launch --nproc_per_node 2 examples/dygraph_alexnet.py
    python examples/dygraph_alexnet.py --pp 3

Every rank prints the pair that is compared: the loss of the single device, fed the pipeline's
micro-batches, and that of the pipeline. At the end all losses, gradients and parameters have been.
A second single device is trained on whole batches; its losses are in the report.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import numpy as np
import paddle
import support
from images import mnist_or_digits
from paddle import nn
from paddle.nn import functional as F

from fleetpipe import fleet, parity
from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer


class ReshapeHelp(nn.Layer):
    def __init__(self, shape: list[int]) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x.reshape(self.shape)


class AlexNet(nn.Layer):
    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2D(1, 64, kernel_size=11, stride=4, padding=5),
            nn.ReLU(),
            nn.MaxPool2D(kernel_size=2, stride=2),
            nn.Conv2D(64, 192, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2D(kernel_size=2, stride=2),
            nn.Conv2D(192, 384, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2D(384, 256, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2D(256, 256, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2D(kernel_size=2, stride=2),
        )
        self.reshape_layer = ReshapeHelp(shape=[-1, 256])
        self.classifier = nn.Linear(256, num_classes)
        self.loss_fn = nn.CrossEntropyLoss()

    def forward(self, x: paddle.Tensor, y: paddle.Tensor) -> paddle.Tensor:
        x = self.classifier(self.reshape_layer(self.features(x)))
        return self.loss_fn(x, y)


class AlexNetPipe(PipelineLayer):
    def __init__(self, num_classes: int = 10, **kwargs: object) -> None:
        layers = [
            LayerDesc(nn.Conv2D, 1, 64, kernel_size=11, stride=4, padding=5),
            LayerDesc(nn.ReLU),
            LayerDesc(nn.MaxPool2D, kernel_size=2, stride=2),
            LayerDesc(nn.Conv2D, 64, 192, kernel_size=5, padding=2),
            F.relu,
            LayerDesc(nn.MaxPool2D, kernel_size=2, stride=2),
            LayerDesc(nn.Conv2D, 192, 384, kernel_size=3, padding=1),
            F.relu,
            LayerDesc(nn.Conv2D, 384, 256, kernel_size=3, padding=1),
            F.relu,
            LayerDesc(nn.Conv2D, 256, 256, kernel_size=3, padding=1),
            F.relu,
            LayerDesc(nn.MaxPool2D, kernel_size=2, stride=2),
            LayerDesc(ReshapeHelp, shape=[-1, 256]),
            LayerDesc(nn.Linear, 256, num_classes),
        ]
        super().__init__(layers=layers, loss_fn=nn.CrossEntropyLoss(), **kwargs)


def set_random_seed(seed: int, dp_id: int) -> None:
    random.seed(seed)
    np.random.seed(seed + dp_id)
    paddle.seed(seed + dp_id)


def sgd(model: nn.Layer, rate: float | None) -> tuple[paddle.optimizer.Optimizer, object]:
    """Returns an optimizer, and the scheduler to step after each batch (None: a constant rate)."""
    if rate is not None:
        return paddle.optimizer.SGD(learning_rate=rate, parameters=model.parameters()), None
    scheduler = paddle.optimizer.lr.PiecewiseDecay(boundaries=[2], values=[0.001, 0.002])
    return paddle.optimizer.SGD(learning_rate=scheduler, parameters=model.parameters()), scheduler


def main() -> int:
    world = int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))
    parser = support.options("AlexNet in a pipeline, beside a single device.", steps=5)
    parser.add_argument("--pp", type=int, default=max(world, 2), help="pipeline ranks")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, help="default: 0.001, then 0.002")
    parser.add_argument("--data", type=Path, help="folder with MNIST's .gz files")
    args = parser.parse_args()
    images, labels, data_name = mnist_or_digits(args.data)
    print(f"data: {data_name}, {len(images)} images")

    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 1, "pp_degree": args.pp}
    strategy.pipeline_configs = {
        "accumulate_steps": args.batch_size // args.micro_batch_size,
        "micro_batch_size": args.micro_batch_size,
        "schedule_mode": args.schedule,
    }
    strategy.fleetpipe_configs = {"trace": args.trace}
    fleet.init(is_collective=True, strategy=strategy)
    hcg = fleet.get_hybrid_communicate_group()
    set_random_seed(1024, hcg.get_data_parallel_rank())

    # The network on a single device, trained on whole batches.
    model_a = AlexNet(10)
    optimizer_a, scheduler_a = sgd(model_a, args.learning_rate)

    # The pipeline, started from the same weights.
    model_b = AlexNetPipe(num_stages=args.pp, topology=hcg.topology())
    model_b.load_from(model_a)
    print(model_b.stage_table())
    optimizer_b, scheduler_b = sgd(model_b, args.learning_rate)
    model_b = fleet.distributed_model(model_b)
    optimizer_b = fleet.distributed_optimizer(optimizer_b)

    # The single-device network once more, on the pipeline's micro-batches: that one is compared.
    model_c = AlexNet(10)
    optimizer_c, scheduler_c = sgd(model_c, args.learning_rate)
    session = parity.begin(model_b, optimizer_b, model_c, optimizer_c, loss_of=model_c)

    whole_batch_loss = []
    for img, label in support.batches(images, labels, args.batch_size, args.steps):
        loss_a = model_a(img, label)
        loss_a.backward()
        optimizer_a.step()
        optimizer_a.clear_grad()
        loss_c, loss_b = session.step([img, label], scheduler_b)
        for scheduler in (scheduler_a, scheduler_c):
            if scheduler is not None:
                scheduler.step()
        whole_batch_loss.append(float(loss_a))
        print("single_loss: ", loss_c.numpy(), "pp_loss: ", loss_b.numpy())

    print(session.report.verdict(), flush=True)
    if model_b.is_pipeline_last_stage():
        support.write_report(
            args.report,
            session.report,
            whole_batch_loss=whole_batch_loss,
            ranks=args.pp,
            dp=1,
            mp=1,
            schedule=model_b.schedule.name,
            paddle=paddle.__version__,
            data=data_name,
        )
    fleet.shutdown()
    return 0 if session.report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
