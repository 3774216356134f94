"""A small GPT whose bits know no layout: its sums are trees, and every layout ends with one hash.

    python examples/one_hash.py
    python -m fleetpipe run --nproc 8 examples/one_hash.py --mp 2 --dp 2 --schedule ZBH1
    python -m fleetpipe run --nproc 4 examples/one_hash.py --sharding 2 --stage 2 --recompute 1
    python examples/one_hash_by_hand.py

all print the same hash: pp is the number of processes divided by ``--dp``, ``--mp`` and
``--sharding``. ``--checkpoint FOLDER`` saves the last step, from which ``--resume`` goes on in any
layout. The last of the four is plain Paddle.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np
import paddle
from gpt import gpt
from paddle import nn

import fleetpipe
from fleetpipe import fleet

VOCABULARY, ROWS = 256, 2  # a token is a byte; of a micro-batch


def batch(step: int, micro_batches: int, length: int) -> tuple[Any, Any]:
    """Returns a step's tokens and those that follow: the language's help pages, row after row."""
    from pydoc_data.topics import topics

    text = np.frombuffer("\n".join(topics.values()).encode(), dtype="uint8").astype("int64")
    rows = text[: len(text) // (length + 1) * (length + 1)].reshape(-1, length + 1)
    size = micro_batches * ROWS
    chosen = rows[np.arange(step * size, (step + 1) * size) % len(rows)]
    return chosen[:, :-1], chosen[:, 1:]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A small GPT with one hash in every layout.")
    parser.add_argument("--steps", type=int, default=5, help="training steps in all")
    parser.add_argument("--schedule", default="1F1B", help="schedule by name, e.g. ZBH1")
    parser.add_argument("--dp", type=int, default=1, help="replicas of the pipeline")
    parser.add_argument("--mp", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--sharding", type=int, default=1, help="replicas that share the optimizer")
    parser.add_argument("--stage", type=int, default=1, choices=(1, 2), help="of ZeRO")
    parser.add_argument("--chunks", type=int, help="chunks of each rank; default: the schedule's")
    parser.add_argument("--recompute", type=int, default=0, help="layers of a recomputed segment")
    parser.add_argument("--micro-batches", type=int, default=8, help="those of all replicas")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--checkpoint", help="folder in which the last step is saved")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--length", type=int, default=32, help="tokens of a row")
    args = parser.parse_args()
    world, args.copies = int(os.environ.get("PADDLE_TRAINERS_NUM", "1")), args.dp * args.sharding
    for name, size, share in (
        ("--micro-batches", args.micro_batches, args.copies),
        ("--heads", args.heads, args.mp),
        ("the number of processes", world, args.copies * args.mp if world > 1 else 1),
    ):
        if size % share:
            parser.error(f"{name} (={size}) must be divisible by {share}")
    args.pp = world // args.copies // args.mp if world > 1 else 2
    return args


def begin(args: argparse.Namespace) -> tuple[Any, Any]:
    """Begins the job; returns the wrapped model and optimizer."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {
        "dp_degree": args.dp,
        "mp_degree": args.mp,
        "pp_degree": args.pp,
        "sharding_degree": args.sharding,
    }
    strategy.sharding = args.sharding > 1
    strategy.sharding_configs = {"stage": args.stage}
    strategy.pipeline_configs = {
        "accumulate_steps": args.micro_batches // args.copies,
        "micro_batch_size": ROWS,
        "schedule_mode": args.schedule,
    }
    strategy.fleetpipe_configs = {"sums": "tree"}
    fleet.init(is_collective=True, strategy=strategy)
    paddle.seed(2026)
    hcg = fleet.get_hybrid_communicate_group()
    layers = gpt(
        args,
        VOCABULARY,
        attention_dropout=args.dropout,
        topology=hcg.topology(),
        recompute_interval=args.recompute,
        recompute_ctx={"mp_group": hcg.get_model_parallel_group()},
        num_virtual_pipeline_stages=args.chunks,
    )
    model = fleet.distributed_model(layers)
    adamw = paddle.optimizer.AdamW(
        1e-3,
        parameters=model.parameters(),
        weight_decay=0.01,
        grad_clip=nn.ClipGradByGlobalNorm(1.0),
    )
    return model, fleet.distributed_optimizer(adamw)


def main() -> None:
    args = options()
    model, optimizer = begin(args)
    manager = fleetpipe.CheckpointManager(args.checkpoint) if args.checkpoint else None
    done = manager.restore(model=model, optimizer=optimizer).step if manager and args.resume else 0
    hcg = fleet.get_hybrid_communicate_group()
    copy = hcg.get_data_parallel_rank() * args.sharding + hcg.get_sharding_parallel_rank()
    for step in range(done, args.steps):
        tokens, following = (
            paddle.to_tensor(np.split(part, args.copies)[copy])
            for part in batch(step, args.micro_batches, args.length)
        )
        loss = model.train_batch([tokens, following], optimizer)
        if fleet.worker_index() == 0:
            print(f"step {step}: loss {float(loss):.9f}", flush=True)
    if manager:
        manager.save(args.steps, model=model, optimizer=optimizer)
        manager.wait()
    hashed = fleetpipe.model_hash(model)
    if fleet.worker_index() == 0:
        print(f"hash: {hashed}", flush=True)
    fleet.shutdown()


if __name__ == "__main__":
    main()
