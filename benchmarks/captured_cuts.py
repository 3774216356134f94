"""Trains ResNet-50 cut "auto", uniformly and balanced, side by side on real ranks.

    OMP_NUM_THREADS=1 python benchmarks/captured_cuts.py [--ranks 2] [--repeats 9] [--size 64]

All three live in one job and train in turn, so that the machine's load hits all alike. "uniform"
has as many nodes in each stage, "balanced" as few parameters as can be in the fullest: what
frameworks cut by that do not measure. For each: the processor time of the slowest rank in a step,
and the step by the clock, as median and range; and the slowest stage that was foretold, beside what
no cut can beat. Processor time is that of a rank's own work whatever else the machine does; with
more ranks than cores the clock tells little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import paddle
from paddle import nn
from paddle.vision.models import resnet50

import fleetpipe
from fleetpipe import fleet
from fleetpipe.capture.explain import Explanation
from fleetpipe.job.job import pipeline_group
from fleetpipe.partition import fastest

CUTS = ("auto", "uniform", "balanced")
MICRO_BATCHES, ROWS, CLASSES = 4, 4, 10


def spec_of(found: Explanation, cut: str, stages: int) -> Any:
    """Returns the ``split_spec`` of a cut."""
    if cut == "auto":
        return cut

    def nodes(stage: int, start: int, end: int) -> float:
        return end - start

    def parameters(stage: int, start: int, end: int) -> float:
        return sum(found.parameters[start:end])

    # A user names a sublayer, not one of its later calls.
    places = [number for number, border in found.places.items() if not border.call]
    cost: Callable[[int, int, int], float] = nodes if cut == "uniform" else parameters
    starts = fastest(places, len(found.trace.nodes), stages, cost).boundaries[1:-1]
    return {found.places[start].path: found.places[start].point for start in starts}


class Contender:
    """A cut, with a model and an optimizer of its own."""

    def __init__(self, cut: str, batch: Sequence[Any], stages: int) -> None:
        self.name = cut
        self._batch = list(batch)
        paddle.seed(0)
        model, example = resnet50(num_classes=CLASSES), batch[0][:ROWS]
        spec = spec_of(fleetpipe.explain(model, example), cut, stages)
        self.pipe = fleetpipe.pipeline(model, example, nn.CrossEntropyLoss(), spec, verify=False)
        self._model = fleet.distributed_model(self.pipe)
        self._optimizer = fleet.distributed_optimizer(
            paddle.optimizer.Momentum(1e-3, parameters=self.pipe.parameters())
        )
        self.steps: list[tuple[float, float]] = []

    def step(self) -> None:
        """Trains one batch and notes the seconds of the clock and of this rank's processor."""
        begin, worked = time.perf_counter(), time.process_time()
        self._model.train_batch(self._batch, self._optimizer)
        self.steps.append((time.perf_counter() - begin, time.process_time() - worked))


def measure(repeats: int, size: int, result: Path) -> None:
    """What each rank does; rank 0 writes the result."""
    ranks = int(os.environ["PADDLE_TRAINERS_NUM"])
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": ranks}
    strategy.pipeline_configs = {"accumulate_steps": MICRO_BATCHES, "micro_batch_size": ROWS}
    fleet.init(is_collective=True, strategy=strategy)
    rows = MICRO_BATCHES * ROWS
    paddle.seed(1)
    batch = [paddle.randn([rows, 3, size, size]), paddle.randint(0, CLASSES, [rows, 1])]
    contenders = [Contender(cut, batch, ranks) for cut in CUTS]
    for _ in range(repeats + 1):
        for contender in contenders:
            contender.step()
    found = []
    for contender in contenders:
        # By rank, then by step, the first of which warms up.
        all_steps = pipeline_group().all_gather(contender.steps)
        steps = [list(zip(*ranks)) for ranks in zip(*(one[1:] for one in all_steps))]
        choice = contender.pipe.choice
        found.append(
            {
                "cut": contender.name,
                "begins": str(choice or ""),
                "clock": [max(clock) for clock, _ in steps],
                "slowest": [max(worked) for _, worked in steps],
                "mean": [statistics.mean(worked) for _, worked in steps],
                "foretold": choice and choice.bottleneck * MICRO_BATCHES,
                "bound": choice and choice.bound * MICRO_BATCHES,
                "parts": contender.pipe.segment_parts,
            }
        )
    if fleet.get_hybrid_communicate_group().get_stage_id() == 0:
        result.write_text(json.dumps(found, indent=1) + "\n")
    fleet.shutdown()


def show(found: list[dict[str, Any]]) -> None:
    """Prints the table."""

    def told(seconds: Sequence[float]) -> str:
        middle, least, most = statistics.median(seconds), min(seconds), max(seconds)
        return f"{middle:6.3f} ({least:.3f} to {most:.3f})"

    print("cut        slowest rank, processor s   of all ranks, mean s       step by the clock, s")
    for row in found:
        figures = "   ".join(told(row[what]) for what in ("slowest", "mean", "clock"))
        print(f"{row['cut']:<10} {figures}   first nodes {row['parts'][1:-1]}")
    auto = found[0]
    print(
        f"auto: {auto['begins']}\n"
        f"{MICRO_BATCHES} micro-batches: slowest stage {auto['foretold']:.3f} s foretold, "
        f"no cut below {auto['bound']:.3f} s"
    )
    for row in found[1:]:
        pairs = [theirs / ours for ours, theirs in zip(auto["slowest"], row["slowest"])]
        clock = [theirs / ours for ours, theirs in zip(auto["clock"], row["clock"])]
        print(f"{row['cut']} to auto, in pairs: slowest rank {told(pairs)}, clock {told(clock)}")


def main() -> int:
    """Launches the ranks of this file and shows what they measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--size", type=int, default=64, help="height and width of the images")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if "PADDLE_TRAINER_ID" in os.environ:
        measure(arguments.repeats, arguments.size, arguments.json)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        result = arguments.json or Path(folder) / "result.json"
        launcher = [sys.executable, "-m", "paddle.distributed.launch"]
        launcher += ["--nproc_per_node", str(arguments.ranks), "--log_dir", folder]
        command = [*launcher, __file__, "--json", str(result.resolve())]
        command += ["--repeats", str(arguments.repeats), "--size", str(arguments.size)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stdout[-4000:], done.stderr[-4000:], file=sys.stderr)
            return 1
        show(json.loads(result.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
