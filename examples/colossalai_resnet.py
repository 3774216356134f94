"""ColossalAI's pipeline tutorial: a ResNet on CIFAR-10, two stages, four micro-batches.

    python examples/colossalai_resnet.py --layers 18 --width 16 --steps 4 --report report.json
    python -m paddle.distributed.launch --nproc_per_node 4 examples/colossalai_resnet.py --dp 2

The program is the tutorial's, with other imports, Paddle's layers and a loop in the place of its
Trainer. With ``--report`` the untouched network is trained beside it, on the same micro-batches.
"""

from __future__ import annotations

import os
import sys
import zlib  # noqa: F401  # first: paddlepaddle 2.6.2 brings one that Python cannot use
from pathlib import Path
from typing import Any

import paddle
import support
from images import cifar10, digits
from paddle import nn
from resnet import DEPTHS, ResNet

from fleetpipe import parity
from fleetpipe.compat import colossalai
from fleetpipe.compat.colossalai import ParallelMode, PipelinableContext, gpc, lr_scheduler

EXEC_SEQ = [
    *("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool"),
    *((lambda x: paddle.flatten(x, 1), "behind"), "fc"),
]


def options() -> Any:
    world = int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))
    parser = support.options("ColossalAI's pipeline tutorial.", steps=20)
    parser.add_argument("--pp", type=int, default=2, help="pipeline ranks")
    parser.add_argument("--dp", type=int, help="replicas; default: as many as there are processes")
    parser.add_argument("--batch-size", type=int, default=64, help="rows of a replica's batch")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--chunks", type=int, default=1, help="chunks of each rank")
    parser.add_argument("--layers", type=int, default=50, choices=sorted(DEPTHS), help="depth")
    parser.add_argument("--width", type=int, default=64, help="channels of the stem")
    parser.add_argument("--data", type=Path, help="cifar-10-python.tar.gz; default: digits")
    args = parser.parse_args()
    replicas = max(world // args.pp, 1)
    if args.dp not in (None, replicas):
        parser.error(f"--dp (={args.dp}) must be {world} processes / --pp (={args.pp})")
    args.dp = replicas
    return args


def main() -> int:
    args = options()
    found, labels, data_name = cifar10(args.data) if args.data else digits(4, 3)
    print(f"data: {data_name}, {len(found)} images")
    config = {
        "NUM_MICRO_BATCHES": args.micro_batches,
        "NUM_CHUNKS": args.chunks,
        "SCHEDULE": args.schedule,
        "parallel": {"pipeline": args.pp},
    }
    colossalai.launch_from_torch(config=config)
    pipelinable = PipelinableContext()

    # build model
    with pipelinable:
        model = ResNet(args.layers, args.width)
    pipelinable.to_layer_list(EXEC_SEQ)
    rank = gpc.get_local_rank(ParallelMode.PIPELINE)
    model = pipelinable.partition(args.chunks, gpc.pipeline_parallel_size, rank)
    print(model.stage_table())

    # build criterion, optimizer, dataloader, lr_scheduler
    criterion = nn.CrossEntropyLoss()
    optimizer = paddle.optimizer.Adam(1e-3, parameters=model.parameters())
    dataset = paddle.io.TensorDataset([paddle.to_tensor(found), paddle.to_tensor(labels)])
    loader = colossalai.get_dataloader(dataset, batch_size=args.batch_size)
    epochs = -(-args.steps // len(loader))
    scheduler = lr_scheduler.LinearWarmupLR(optimizer, epochs + 1, warmup_steps=1)
    engine, loader, _, scheduler = colossalai.initialize(
        model, optimizer, criterion, loader, None, scheduler
    )
    session = None
    if args.report:
        # The engine learns the rows of a micro-batch from its first batch, too late to compare.
        engine.model.micro_batch_size = args.batch_size // args.micro_batches
        session = compared(engine, ResNet(args.layers, args.width))

    engine.train()
    step = 0
    for epoch in range(epochs):
        for batch in loader:
            if step == args.steps:
                break
            loss = session.step(batch)[1] if session else train(engine, batch)
            if gpc.is_last_rank(ParallelMode.PIPELINE):
                print(f"[Epoch {epoch}, batch {step}] loss: {float(loss):.5f}", flush=True)
            step += 1
        scheduler.step()

    passed = session is None or report(session, engine, args, data_name)
    gpc.destroy()
    return 0 if passed else 1


def train(engine: Any, batch: Any) -> Any:
    """Trains on one batch, as a program with an engine does; returns its loss."""
    engine.zero_grad()
    _, _, loss = engine.execute_schedule(iter([batch]))
    engine.step()
    return loss


def compared(engine: Any, plain: nn.Layer) -> parity.Session:
    """Begins to train the untouched network beside the engine's."""

    def train_batch(batch: Any, optimizer: Any, *_: Any) -> Any:
        engine.optimizer = optimizer  # which compares the gradients before it steps
        return train(engine, batch)

    return parity.begin(engine.model, engine.optimizer, plain, train_batch=train_batch)


def report(session: parity.Session, engine: Any, args: Any, data_name: str) -> bool:
    """Prints and writes what the comparison found; returns whether it passes."""
    print(session.report.verdict(), flush=True)
    if gpc.is_last_rank(ParallelMode.PIPELINE) and gpc.is_first_rank(ParallelMode.DATA):
        support.write_report(
            args.report,
            session.report,
            ranks=args.pp,
            dp=args.dp,
            mp=1,
            schedule=engine.model.schedule.name,
            paddle=paddle.__version__,
            data=data_name,
        )
    return session.report.passed


if __name__ == "__main__":
    sys.exit(main())
