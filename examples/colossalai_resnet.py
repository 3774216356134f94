"""ColossalAI's pipeline tutorial: a ResNet on CIFAR-10, two stages, four micro-batches.

    python examples/colossalai_resnet.py --layers 18 --width 8
    python -m paddle.distributed.launch --nproc_per_node 4 examples/colossalai_resnet.py --dp 2

The program is the tutorial's, with other imports and Paddle's layers. With ``--report`` the
untouched network is trained beside it, on the same micro-batches, in the place of its Trainer.
"""

from __future__ import annotations

import os
import sys
import zlib  # noqa: F401  # first: paddlepaddle 2.6.2 brings one that Python cannot use
from pathlib import Path
from typing import Any

import paddle
import support
from images import digits, held_out
from paddle import nn
from resnet import DEPTHS, ResNet

from fleetpipe import parity
from fleetpipe.compat import colossalai
from fleetpipe.compat.colossalai import build_cifar
from fleetpipe.compat.colossalai import nn as col_nn
from fleetpipe.compat.colossalai.context import ParallelMode
from fleetpipe.compat.colossalai.core import global_context as gpc
from fleetpipe.compat.colossalai.logging import disable_existing_loggers, get_dist_logger
from fleetpipe.compat.colossalai.pipeline.pipelinable import PipelinableContext
from fleetpipe.compat.colossalai.trainer import Trainer, hooks
from fleetpipe.compat.colossalai.utils import MultiTimer, get_dataloader

EXEC_SEQ = [
    *("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool"),
    *((lambda x: paddle.flatten(x, 1), "behind"), "fc"),
]


def options() -> Any:
    world = int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))
    parser = support.options("ColossalAI's pipeline tutorial.", steps=None)
    parser.add_argument("--epochs", type=int, default=2, help="passes over the data")
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


def loaders(args: Any) -> tuple[Any, Any, str]:
    """Returns data to train on, other data to evaluate on, and their name."""
    if args.data:
        return *build_cifar(args.batch_size, args.data, padding=4, crop=32, resize=32), "CIFAR-10"
    images, labels, name = digits(4, 3)
    train, test = held_out(images, labels)
    return (
        get_dataloader(train, shuffle=True, batch_size=args.batch_size),
        get_dataloader(test, drop_last=False, batch_size=args.batch_size),
        name,
    )


def main() -> int:
    args = options()
    config = {
        "NUM_MICRO_BATCHES": args.micro_batches,
        "NUM_CHUNKS": args.chunks,
        "SCHEDULE": args.schedule,
        "parallel": {"pipeline": args.pp},
    }
    disable_existing_loggers()
    colossalai.launch_from_torch(config=config)
    logger = get_dist_logger()
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
    train_dataloader, test_dataloader, name = loaders(args)
    print(f"data: {name}, {len(train_dataloader)} batches of {args.batch_size}", flush=True)
    lr_scheduler = col_nn.lr_scheduler.LinearWarmupLR(optimizer, args.epochs, warmup_steps=1)
    engine, train_dataloader, test_dataloader, lr_scheduler = colossalai.initialize(
        model, optimizer, criterion, train_dataloader, test_dataloader, lr_scheduler
    )
    if args.report:
        passed = compare(engine, train_dataloader, args, name)
        gpc.destroy()
        return 0 if passed else 1

    timer = MultiTimer()
    trainer = Trainer(engine=engine, timer=timer, logger=logger)
    hook_list = [
        hooks.LossHook(),
        hooks.AccuracyHook(col_nn.metric.Accuracy()),
        hooks.LogMetricByEpochHook(logger),
        hooks.LRSchedulerHook(lr_scheduler, by_epoch=True),
    ]
    trainer.fit(
        train_dataloader=train_dataloader,
        epochs=args.epochs,
        max_steps=args.steps,
        test_dataloader=test_dataloader,
        test_interval=1,
        hooks=hook_list,
        display_progress=True,
    )
    gpc.destroy()
    return 0


def compare(engine: Any, loader: Any, args: Any, name: str) -> bool:
    """Trains the untouched network beside the engine's, without a Trainer; returns the verdict."""
    # The engine learns the rows of a micro-batch from its first batch, too late to compare.
    engine.model.micro_batch_size = args.batch_size // args.micro_batches

    def train_batch(batch: Any, optimizer: Any, *_: Any) -> Any:
        engine.optimizer = optimizer  # which compares the gradients before it steps
        engine.zero_grad()
        _, _, loss = engine.execute_schedule(iter([batch]))
        engine.step()
        return loss

    plain = ResNet(args.layers, args.width)
    session = parity.begin(engine.model, engine.optimizer, plain, train_batch=train_batch)
    for step, batch in enumerate(loader):
        if step == args.steps:
            break
        loss = session.step(batch)[1]
        if gpc.is_last_rank(ParallelMode.PIPELINE):
            print(f"[Epoch 0, batch {step}] loss: {float(loss):.5f}", flush=True)
    return report(session, engine, args, name)


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
