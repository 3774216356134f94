"""Measures the peak bytes of 1F1B and Seq1F1B on real ranks, beside what is predicted.

python benchmarks/slices.py                          2 and 4 ranks, sequences of 1024 in 1, 2, 4
python benchmarks/slices.py --ranks 2 --length 2048 --slices 1,8

A peak is what training adds to the peak of a process that has built the model and trained on one
short batch before; it is not disturbed by what else the machine does. FLEETPIPE_HEAP=0 keeps freed
memory out of it.
"""

from __future__ import annotations

import argparse
import resource
import sys
from pathlib import Path

from benchmarks.figures import Figure, answer, is_rank, on_ranks, parser, report, started

ROOT = Path(__file__).resolve().parent.parent
SHORT = 16


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ranks", default="2,4")
    options.add_argument("--micro-batches", type=int, default=4)
    options.add_argument("--slices", default="1,2,4", help="1 is the schedule 1F1B")
    options.add_argument("--length", type=int, default=1024)
    options.add_argument("--width", type=int, default=64)
    options.add_argument("--heads", type=int, default=4)
    options.add_argument("--blocks", type=int, default=4)
    arguments = options.parse_args()
    if is_rank():
        answer(work(arguments))
        return
    figures = []
    for ranks in map(int, arguments.ranks.split(",")):
        first: tuple[float, float] | None = None
        for slices in map(int, arguments.slices.split(",")):
            added = on_ranks(ranks, "--ranks", str(ranks), "--slices", str(slices))
            peaks = [one / 2**20 for one in added]
            held = simulated(ranks, arguments.micro_batches, slices)
            first = first or (max(peaks), held)
            rows = [
                Figure("peak, by rank", peaks, "MiB"),
                Figure("peak, of 1F1B's", [max(peaks) / first[0]]),
                Figure("peak, of 1F1B's, predicted", [held / first[1]]),
            ]
            title = f"{ranks} ranks, {slices} chunks"
            figures += [row._replace(name=f"{title}: {row.name}") for row in rows]
    report(figures, arguments.json)


def simulated(ranks: int, micro_batches: int, slices: int) -> float:
    """Returns the micro-batches that rank 0 holds at most, by the schedule alone."""
    from fleetpipe.schedules import build

    schedule = build("Seq1F1B", ranks=ranks, micro_batches=micro_batches, slices=slices)
    return max(schedule.simulate().peak_activations) / slices


def work(args: argparse.Namespace) -> int:
    """Trains as one rank, and returns the bytes that this added to its peak."""
    sys.path.insert(0, str(ROOT / "examples"))
    import numpy as np
    import paddle
    from gpt import gpt

    from fleetpipe import fleet

    args.dropout = 0.0
    started(int(args.ranks), args.micro_batches, 1, "Seq1F1B", slices=int(args.slices))
    paddle.seed(1)
    topology = fleet.get_hybrid_communicate_group().topology()
    model = fleet.distributed_model(gpt(args, 256, topology=topology))
    sgd = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    optimizer = fleet.distributed_optimizer(sgd)

    def train(length: int) -> None:
        tokens = np.random.default_rng(0).integers(0, 256, (args.micro_batches, length + 1))
        data = [paddle.to_tensor(tokens[:, :-1]), paddle.to_tensor(tokens[:, 1:])]
        model.train_batch(data, optimizer)

    train(SHORT)
    before = peak()
    train(args.length)
    fleet.shutdown()
    return peak() - before


def peak() -> int:
    """Returns the most bytes that this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
