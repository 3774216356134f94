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
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHORT = 16


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--slices", default="1,2,4", help="1 is the schedule 1F1B")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--times", action="store_true", help="profile and trace as well")
    parser.add_argument("--steps", type=int, default=5, help="of which times are the fastest")
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = options()
    if args.report is not None:
        work(args)
        return
    head = "| ranks | schedule | slices | peak MiB by rank | of 1F1B's | predicted of 1F1B's |"
    more = " bubble | predicted | step ms | predicted ms |" if args.times else ""
    print(f"{head}{more}\n|{'---|' * (head + more).count(' | ')}---|")
    for ranks in map(int, args.ranks.split(",")):
        first: tuple[float, float] | None = None
        for slices in map(int, args.slices.split(",")):
            found = measured(args, ranks, slices)
            peaks = [one["bytes"] / 2**20 for one in found]
            held = simulated(ranks, args.micro_batches, slices)
            first = first or (max(peaks), held)
            row = [ranks, "Seq1F1B" if slices > 1 else "1F1B", slices]
            row += [" ".join(f"{peak:.1f}" for peak in peaks)]
            row += [f"{max(peaks) / first[0]:.2f}", f"{held / first[1]:.2f}"]
            if args.times:
                row += [f"{found[0][name]:.1%}" for name in ("bubble", "predicted bubble")]
                row += [f"{1e3 * found[0][name]:.1f}" for name in ("step", "predicted step")]
            print("|", " | ".join(map(str, row)), "|", flush=True)


def simulated(ranks: int, micro_batches: int, slices: int) -> float:
    """Returns the micro-batches that rank 0 holds at most, by the schedule alone."""
    from fleetpipe.schedules import build

    schedule = build("Seq1F1B", ranks=ranks, micro_batches=micro_batches, slices=slices)
    return max(schedule.simulate().peak_activations) / slices


def measured(args: argparse.Namespace, ranks: int, slices: int) -> list[dict[str, float]]:
    """Runs a job, and returns what each of its ranks found."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "paddle.distributed.launch"]
        command += ["--nproc_per_node", f"{ranks}", "--log_dir", f"{folder}/log", __file__]
        given = {**vars(args), "ranks": ranks, "slices": slices, "report": folder}
        command += ["--times"] if given.pop("times") else []
        for name, value in given.items():
            command += [f"--{name.replace('_', '-')}", f"{value}"]
        subprocess.run(command, check=True, capture_output=True, timeout=900)
        return [json.loads((Path(folder) / f"{r}.json").read_text()) for r in range(ranks)]


def work(args: argparse.Namespace) -> None:
    """Trains as one rank, and writes what that added to its peak."""
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
        strategy.fleetpipe_configs = {"slices": slices, "trace": f"{args.report}/trace"}
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
    found = {"loss": float(model.train_batch(data(args.length), optimizer))}
    found["bytes"] = peak() - before
    if args.times:
        found.update(times(args, model, data(args.length), optimizer))
    (args.report / f"{os.environ['PADDLE_TRAINER_ID']}.json").write_text(json.dumps(found))
    fleet.shutdown()


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
        "step": min(seconds),
        "predicted step": timeline.makespan,
        "bubble": 1 - busy / span,
        "predicted bubble": timeline.bubble_rate,
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
