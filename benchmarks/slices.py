"""Measures 1F1B and Seq1F1B on real ranks: bubble and peak bytes, beside what is predicted.

python benchmarks/slices.py                          2 and 4 ranks, sequences of 1024 in 1, 2, 4
python benchmarks/slices.py --ranks 2 --length 2048 --slices 1,8
python benchmarks/slices.py --ranks 2 --times        step times and bubbles too; an idle machine

A peak is what training adds to the peak of a process that has built the model and trained on one
short batch before; it is not disturbed by what else the machine does. FLEETPIPE_HEAP=0 keeps freed
memory out of it. The bubble is that of the traced steps, in which ranks that outnumber the
processors wait for these too.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, answer, is_rank, on_ranks, parser, report

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
    options.add_argument("--times", action="store_true", help="profile and trace as well")
    options.add_argument("--steps", type=int, default=5, help="of which times are the fastest")
    arguments = options.parse_args()
    if is_rank():
        with tempfile.TemporaryDirectory() as folder:
            answer(work(arguments, f"{folder}/trace"))
        return
    figures = []
    for ranks in map(int, arguments.ranks.split(",")):
        first: tuple[float, float] | None = None
        for slices in map(int, arguments.slices.split(",")):
            results = on_ranks(ranks, "--ranks", str(ranks), "--slices", str(slices))
            peaks = [one.pop("bytes") / 2**20 for one in results]
            held = simulated(ranks, arguments.micro_batches, slices)
            first = first or (max(peaks), held)
            rows = [
                Figure("peak, by rank", peaks, "MiB"),
                Figure("peak, of 1F1B's", [max(peaks) / first[0]]),
                Figure("peak, of 1F1B's, predicted", [held / first[1]]),
                *(Figure(name, [value]) for name, value in results[0].items()),
            ]
            title = f"{ranks} ranks, {slices} chunks"
            figures += [row._replace(name=f"{title}: {row.name}") for row in rows]
    report(figures, arguments.json)


def simulated(ranks: int, micro_batches: int, slices: int) -> float:
    """Returns the micro-batches that rank 0 holds at most, by the schedule alone."""
    from fleetpipe.schedules import build

    schedule = build("Seq1F1B", ranks=ranks, micro_batches=micro_batches, slices=slices)
    return max(schedule.simulate().peak_activations) / slices


def work(args: argparse.Namespace, trace: str) -> dict[str, float]:
    """Trains as one rank, and returns what that added to its peak."""
    sys.path.insert(0, str(ROOT / "examples"))
    import numpy as np
    import paddle
    from gpt import gpt

    from fleetpipe import fleet

    args.dropout, slices = 0.0, int(args.slices)
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": int(args.ranks)}
    strategy.pipeline_configs = {
        "accumulate_steps": args.micro_batches,
        "micro_batch_size": 1,
        "schedule_mode": "Seq1F1B",
    }
    strategy.fleetpipe_configs = {"slices": slices}
    if args.times:
        strategy.fleetpipe_configs = {"slices": slices, "trace": trace}
    fleet.init(is_collective=True, strategy=strategy)
    paddle.seed(1)
    topology = fleet.get_hybrid_communicate_group().topology()
    model = fleet.distributed_model(gpt(args, 256, topology=topology))
    sgd = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    optimizer = fleet.distributed_optimizer(sgd)

    def data(length: int) -> list[Any]:
        tokens = np.random.default_rng(0).integers(0, 256, (args.micro_batches, length + 1))
        return [paddle.to_tensor(tokens[:, :-1]), paddle.to_tensor(tokens[:, 1:])]

    model.train_batch(data(SHORT), optimizer)
    before = peak()
    model.train_batch(data(args.length), optimizer)
    result: dict[str, float] = {"bytes": peak() - before}
    if args.times:
        result.update(times(args, model, data(args.length), optimizer))
    fleet.shutdown()
    return result


def times(
    args: argparse.Namespace, model: Any, data: list[Any], optimizer: Any
) -> dict[str, float]:
    """Returns seconds and bubble of the fastest step, and what a profile of this cut predicts."""
    from fleetpipe.schedules import Costs

    seconds = []
    for _ in range(args.steps):
        begin = time.perf_counter()
        model.train_batch(data, optimizer)
        seconds.append(time.perf_counter() - begin)
    steps = model.trace.steps()
    spans = [span_and_busy(step) for step in steps[-args.steps :]] if steps else [(1.0, 1.0)]
    span, busy = min(spans)
    costs = Costs.from_json(json.dumps(model.profile(data).stage_costs()))
    timeline = model.schedule.simulate(costs)
    return {
        "step, s": min(seconds),
        "step, predicted, s": timeline.makespan,
        "bubble": 1 - busy / span,
        "bubble, predicted": timeline.bubble_rate,
    }


def span_and_busy(events: Any) -> tuple[float, float]:
    """Returns the longest that a rank takes from its first action to its last, and computes."""
    of_ranks: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event.actions:
            of_ranks.setdefault(event.rank, []).append((event.start, event.end))
    spans = [max(e for _, e in row) - min(b for b, _ in row) for row in of_ranks.values()]
    return max(spans), max(sum(e - b for b, e in row) for row in of_ranks.values())


def peak() -> int:
    """Returns the most bytes that this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
