"""A small GPT with a tied embedding on the standard library's text: dp x mp x pp, in any schedule.

    python examples/dygraph_gpt.py --report report.json
    python -m paddle.distributed.launch --nproc_per_node 2 examples/dygraph_gpt.py
    python -m paddle.distributed.launch --nproc_per_node 4 examples/dygraph_gpt.py --mp 2 --report r

Without the launcher one process plays all ``--pp`` ranks. With ``--report`` a single device trains
beside the pipeline and is compared with it; without, the tokens per second are the pipeline's.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
import support
from gpt import gpt
from paddle import nn

from fleetpipe import fleet
from fleetpipe.io import DistributedBatchSampler

VOCABULARY = 256  # a token is a byte
DATA = "pydoc_data.topics"


def text() -> np.ndarray:
    """Returns the bytes of the language's own help pages, int64 [N]."""
    from pydoc_data.topics import topics

    return np.frombuffer("\n".join(topics.values()).encode(), dtype=np.uint8).astype("int64")


def batches(sampler: Any, rows: np.ndarray) -> Iterator[list[Any]]:
    """Yields the batches [tokens, the tokens that follow] of this rank's replica, endlessly."""
    while True:
        for chosen in sampler:
            yield [paddle.to_tensor(rows[chosen, :-1]), paddle.to_tensor(rows[chosen, 1:])]


def options() -> argparse.Namespace:
    world = int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))
    parser = support.options("A small GPT on the standard library's text.", steps=20)
    parser.add_argument("--dp", type=int, default=1, help="replicas of the pipeline")
    parser.add_argument("--mp", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--pp", type=int, help="pipeline ranks; default: world / dp / mp")
    parser.add_argument("--chunks", type=int, help="chunks of each rank; default: the schedule's")
    parser.add_argument("--slices", type=int, help="of Seq1F1B: slices of a row; default: 2")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--recompute", type=int, default=0, help="layers of a recomputed segment")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=64, help="tokens of a row")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument(
        "--tolerance",
        type=float,
        help="largest relative difference that passes; default: 1e-5, and 1e-4 with --mp. The tied "
        "embedding adds up its two gradients, and replicas and members theirs, in another order "
        "than a single device; AdamW enlarges what that changes, more in each step",
    )
    args = parser.parse_args()
    if args.tolerance is None:
        args.tolerance = 1e-5 if args.mp == 1 else 1e-4
    for name, size, share in (
        ("--width", args.width, args.heads),
        ("--heads", args.heads, args.mp),
        ("the vocabulary", VOCABULARY, args.mp),
        ("the number of processes", world, args.dp * args.mp if world > 1 else 1),
    ):
        if size % share:
            parser.error(f"{name} (={size}) must be divisible by {share}")
    args.pp = args.pp or (world // args.dp // args.mp if world > 1 else 2)
    return args


def pipeline(args: argparse.Namespace) -> Any:
    """Begins the job and returns the wrapped model."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {
        "dp_degree": args.dp,
        "mp_degree": args.mp,
        "pp_degree": args.pp,
    }
    strategy.pipeline_configs = {
        "accumulate_steps": args.micro_batches,
        "micro_batch_size": args.micro_batch_size,
        "schedule_mode": args.schedule,
    }
    strategy.fleetpipe_configs = {"trace": args.trace, "slices": args.slices}
    fleet.init(is_collective=True, strategy=strategy)
    paddle.seed(2026)
    hcg = fleet.get_hybrid_communicate_group()
    layers = gpt(
        args,
        VOCABULARY,
        topology=hcg.topology(),
        recompute_interval=args.recompute,
        recompute_ctx={"mp_group": hcg.get_model_parallel_group()},
        num_virtual_pipeline_stages=args.chunks,
    )
    print(layers.stage_table())
    return fleet.distributed_model(layers)


def main() -> int:
    args = options()
    model = pipeline(args)

    def make(parameters: Any) -> Any:
        # Gradients below 1e-8 are rounding errors here; with the usual epsilon, which is as small,
        # AdamW makes whole steps of them.
        return paddle.optimizer.AdamW(
            args.learning_rate,
            epsilon=1e-6,
            parameters=parameters,
            weight_decay=0.01,
            grad_clip=nn.ClipGradByGlobalNorm(1.0),
        )

    optimizer = fleet.distributed_optimizer(make(parameters=model.parameters()))
    compared = None
    if args.report:
        compared = support.Comparison(model, optimizer, make, args.tolerance)

    tokens = text()
    rows = tokens[: len(tokens) // (args.length + 1) * (args.length + 1)]
    rows = rows.reshape([-1, args.length + 1])
    print(f"data: {DATA}, {len(tokens)} bytes in {len(rows)} rows")
    batch_size = args.micro_batches * args.micro_batch_size
    data = batches(DistributedBatchSampler(rows, batch_size), rows)
    hcg = fleet.get_hybrid_communicate_group()
    first = hcg.get_data_parallel_rank() == hcg.get_model_parallel_rank() == 0
    telling = model.is_pipeline_last_stage() and first

    seconds: list[float] = []
    for step, batch in enumerate(itertools.islice(data, args.steps)):
        begin = time.perf_counter()
        loss = compared.step(batch) if compared else model.train_batch(batch, optimizer)
        seconds.append(time.perf_counter() - begin)
        if telling:
            print(f"step {step}: loss {float(loss):.4f}, {seconds[-1]:.2f} s", flush=True)
    if telling and not compared and args.steps > 1:
        speed = args.dp * batch_size * args.length / float(np.median(seconds[1:]))
        print(f"{model.schedule.name}: {speed:.0f} tokens/s", flush=True)
    if compared:
        print(compared.report.verdict(), flush=True)
    if compared and telling:
        support.write_report(
            args.report,
            compared.report,
            whole_batch_loss=compared.whole_batch_loss,
            ranks=args.pp,
            dp=args.dp,
            mp=args.mp,
            schedule=model.schedule.name,
            paddle=paddle.__version__,
            data=DATA,
        )
    fleet.shutdown()
    return 0 if compared is None or compared.report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
