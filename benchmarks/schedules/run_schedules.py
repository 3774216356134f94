"""Trains the GPT stack under several schedules side by side, on two CPU ranks.

    OMP_NUM_THREADS=1 python benchmarks/schedules/run_schedules.py [--repeats 7] [--hidden 256 768]

All schedules live in one job and train in turn, so that the machine's load hits all alike. The
bubble is that of one traced step, beside what the simulator predicts from the mean cost of each
action in it. Memory is the most that the tensors of rank 0 took beyond what they took before the
step.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paddle import nn
from paddle.base import core

from benchmarks.figures import Figure, answer, is_rank, on_ranks, parser, report, started, wrapped
from benchmarks.workers import gpt
from fleetpipe import fleet
from fleetpipe.engine.trace import measured_costs
from fleetpipe.schedules.forms import figures_of

SCHEDULES = ("1F1B", "FThenB", "Interleaved1F1B", "ZBH1", "ZBV")
#: Numbers of micro-batches by the size of a vector.
MICRO_BATCHES = {256: (8, 16), 768: (8,)}
UNITS = {"a step": "s", "peak": "MiB"}


class Contender:
    """A schedule with a model and an optimizer of its own."""

    def __init__(self, schedule: str, micro_batches: int, hidden: int, folder: str) -> None:
        self.case = replace(gpt.CASES["gpt 256"], micro_batches=micro_batches, hidden=hidden)
        self.batch = self.case.batch()
        self.plain, self.optimizer = self._model(schedule, None)
        self.traced, _ = self._model(schedule, folder)
        self.seconds: list[float] = []

    def _model(self, schedule: str, trace: str | None) -> tuple[Any, Any]:
        case = self.case
        started(case.ranks, case.micro_batches, case.rows, schedule, trace=trace)
        return wrapped(case.layers(), nn.MSELoss(), "SGD")

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


def measure(hidden: int, micro_batches: int, arguments: argparse.Namespace) -> list[Any]:
    """Returns the figures of all schedules on this rank."""
    with tempfile.TemporaryDirectory() as folder:
        contenders = {
            name: Contender(name, micro_batches, hidden, folder) for name in arguments.schedules
        }
        for _ in range(arguments.repeats + 1):
            for contender in contenders.values():
                contender.step()
        rows = {name: row_of(contender) for name, contender in contenders.items()}
        fleet.shutdown()
    first = next(iter(rows.values()))["a step"]
    for row in rows.values():
        row["to the first"] = [one / base for one, base in zip(row["a step"], first)]
    case = f"hidden {hidden}, m={micro_batches}"
    return [
        (f"{case}, {name}: {what}", values, UNITS.get(what, ""))
        for name, row in rows.items()
        for what, values in row.items()
    ]


def row_of(contender: Contender) -> dict[str, Sequence[float]]:
    """Returns what a schedule's figures are."""
    row: dict[str, Sequence[float]] = {"a step": contender.seconds[1:]}
    if bubbles := contender.bubbles():
        row["bubble"], row["bubble, predicted"] = [bubbles[0]], [bubbles[1]]
    if peak := contender.peak_bytes():
        row["peak"] = [peak / 2**20]
    return row


def main() -> None:
    """Launches two ranks of this file and shows what rank 0 measured."""
    options = parser(__doc__, repeats=7)
    sizes = list(MICRO_BATCHES)
    options.add_argument("--hidden", type=int, nargs="+", choices=sizes, default=sizes)
    options.add_argument("--schedules", nargs="+", default=SCHEDULES, help="the first is the base")
    arguments = options.parse_args()
    if is_rank():
        cases = [(hidden, m) for hidden in arguments.hidden for m in MICRO_BATCHES[hidden]]
        answer([row for case in cases for row in measure(*case, arguments)])
        return
    report([Figure(*row) for row in on_ranks(2)[0]], arguments.json)


if __name__ == "__main__":
    main()
