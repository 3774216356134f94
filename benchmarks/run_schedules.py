"""Trains the GPT stack under several schedules side by side, on two CPU ranks.

    OMP_NUM_THREADS=1 python benchmarks/run_schedules.py [--repeats 7] [--hidden 256 768]

All schedules live in one job and train in turn, so that the machine's load hits all alike. Times
are medians; the bubble is that of one traced step, beside what the simulator predicts from the mean
cost of each action in it. Memory is the most that the tensors of rank 0 took beyond what they took
before the step.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpt
import paddle
from paddle import nn
from paddle.base import core

from fleetpipe import fleet
from fleetpipe.engine.trace import measured_costs
from fleetpipe.fleet.meta_parallel import PipelineLayer
from fleetpipe.schedules.forms import figures_of

SCHEDULES = ("FThenB", "1F1B", "Interleaved1F1B", "ZBH1", "ZBV")
#: Numbers of micro-batches by the size of a vector.
MICRO_BATCHES = {256: (8, 16), 768: (8,)}


class Contender:
    """A schedule with a model and an optimizer of its own."""

    def __init__(self, schedule: str, micro_batches: int, hidden: int, folder: str) -> None:
        self.case = replace(gpt.CASES["gpt"], micro_batches=micro_batches, hidden=hidden)
        self.batch = self.case.batch()
        self.plain = self._model(schedule, None)
        self.traced = self._model(schedule, folder)
        self.optimizer = fleet.distributed_optimizer(
            paddle.optimizer.SGD(1e-4, parameters=self.plain.parameters())
        )
        self.seconds: list[float] = []

    def _model(self, schedule: str, trace: str | None) -> Any:
        strategy = fleet.DistributedStrategy()
        strategy.hybrid_configs = {"pp_degree": self.case.ranks}
        strategy.pipeline_configs = {
            "accumulate_steps": self.case.micro_batches,
            "micro_batch_size": self.case.rows,
            "schedule_mode": schedule,
        }
        strategy.fleetpipe_configs = {"trace": trace}
        fleet.init(is_collective=True, strategy=strategy)
        topology = fleet.get_hybrid_communicate_group().topology()
        layers = PipelineLayer(self.case.layers(), topology=topology, loss_fn=nn.MSELoss())
        return fleet.distributed_model(layers)

    def step(self) -> None:
        """Trains one batch and notes how long it took."""
        begin = time.perf_counter()
        self.plain.train_batch(self.batch, self.optimizer)
        self.seconds.append(time.perf_counter() - begin)

    def peak_bytes(self) -> int | None:
        """Returns the most that a step allocates beyond what is there before it."""
        if not hasattr(core, "host_memory_stat_reset_peak_value"):
            return None
        before = core.host_memory_stat_current_value("Allocated", 0)
        core.host_memory_stat_reset_peak_value("Allocated", 0)
        self.plain.train_batch(self.batch, self.optimizer)
        return int(core.host_memory_stat_peak_value("Allocated", 0) - before)

    def bubbles(self) -> tuple[float, float] | None:
        """Returns the measured and the predicted bubble rate, on rank 0."""
        for _ in range(3):
            self.traced.forward_backward_pipeline(self.batch)
        steps = self.traced.trace.steps()
        if not steps:
            return None
        last = steps[-1]
        schedule = self.traced.schedule
        predicted = schedule.simulate(measured_costs(schedule, last)).bubble_rate
        return figures_of(last).bubble_rate, predicted


def measure(repeats: int, sizes: list[int], result: Path) -> None:
    """What each rank does; rank 0 writes the result."""
    found = []
    for hidden, micro_batches in ((size, m) for size in sizes for m in MICRO_BATCHES[size]):
        with tempfile.TemporaryDirectory() as folder:
            contenders = {
                name: Contender(name, micro_batches, hidden, folder) for name in SCHEDULES
            }
            for _ in range(repeats + 1):
                for contender in contenders.values():
                    contender.step()
            for name, contender in contenders.items():
                case = contender.case
                bubbles, peak = contender.bubbles(), contender.peak_bytes()
                found.append(
                    {
                        "hidden": hidden,
                        "schedule": name,
                        "micro_batches": micro_batches,
                        "seconds": statistics.median(contender.seconds[1:]),
                        "least": min(contender.seconds[1:]),
                        "most": max(contender.seconds[1:]),
                        "bubble": bubbles and bubbles[0],
                        "predicted": bubbles and bubbles[1],
                        "mebibytes": peak and peak / 2**20,
                        "ideal": 1 - case.micro_batches / (case.micro_batches + case.ranks - 1),
                    }
                )
            rank = fleet.get_hybrid_communicate_group().get_stage_id()
            fleet.shutdown()
    if rank == 0:
        result.write_text(json.dumps(found, indent=1) + "\n")


def show(found: list[dict[str, Any]]) -> None:
    """Prints the table."""
    columns = "median s   least s   most s   to 1F1B   bubble   predicted   peak MiB"
    print(f"hidden   schedule         m   {columns}")

    def case(row: dict[str, Any]) -> tuple[int, int]:
        return row["hidden"], row["micro_batches"]

    bases = {case(row): row["seconds"] for row in found if row["schedule"] == "1F1B"}
    for row in found:
        base = bases[case(row)]
        peak = "-" if row["mebibytes"] is None else f"{row['mebibytes']:.0f}"
        print(
            f"{row['hidden']:>6}   {row['schedule']:<15} {row['micro_batches']:>2}   "
            f"{row['seconds']:8.3f}   {row['least']:7.3f}   {row['most']:6.3f}   "
            f"{row['seconds'] / base:7.3f}   {row['bubble']:6.3f}   "
            f"{row['predicted']:9.3f}   {peak:>8}"
        )


def main() -> int:
    """Launches two ranks of this file and shows what they measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--hidden",
        type=int,
        nargs="+",
        choices=MICRO_BATCHES,
        default=list(MICRO_BATCHES),
        help="sizes of a vector",
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if "PADDLE_TRAINER_ID" in os.environ:
        measure(arguments.repeats, arguments.hidden, arguments.json)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        result = arguments.json or Path(folder) / "result.json"
        launcher = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", "2"]
        command = [*launcher, "--log_dir", folder, __file__, "--json", str(result)]
        command += ["--repeats", str(arguments.repeats), "--hidden", *map(str, arguments.hidden)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stdout[-4000:], done.stderr[-4000:], file=sys.stderr)
            return 1
        show(json.loads(result.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
