"""Compares all schedules by simulation, as a table in Markdown.

python benchmarks/schedules/compare_schedules.py --ranks 4 --micro-batches 16

Every rank has the same share of the model, whose F, I and W take time 1 each; with v chunks on a
rank, or v slices of a sequence, each takes 1/v. Peaks are in micro-batches of such a share.
"""

from __future__ import annotations

import argparse
import itertools

from fleetpipe.schedules import Costs, Schedule, build

#: Name and chunks on a rank, in the order of the table.
ROWS = (
    *(("FThenB", 1), ("1F1B", 1), ("Eager1F1B", 1), ("kFkB", 1)),
    *(("Interleaved1F1B", 2), ("Interleaved1F1B", 4)),
    *(("ZBH1", 1), ("ZBH1", 2), ("ZBH2", 1), ("ZBV", 2), ("VHalf", 2), ("VMin", 2)),
    *(("DualPipeV", 2), ("Seq1F1B", 1), ("Hanayo", 2), ("Hanayo", 4)),
)
#: Column of the table, with weight gradient and latency in units of F.
CASES = (("bubble", 1.0, 0.0), ("with latency F/10", 1.0, 0.1), ("with W = F/2", 0.5, 0.0))


def rate(schedule: Schedule, weight_grad: float, comm: float) -> str:
    """Returns the bubble rate in per cent."""
    share = 1 / schedule.placement.chunks / schedule.slices
    costs = Costs(share, share, weight_grad * share, comm=comm)
    return f"{100 * schedule.simulate(costs).bubble_rate:.1f} %"


def transfers(schedule: Schedule) -> int:
    """Returns how many values and gradients pass between ranks for one micro-batch."""
    owners = [schedule.placement.rank_of(stage) for stage in range(schedule.placement.stages)]
    return (
        2
        * schedule.slices
        * sum(owner != following for owner, following in itertools.pairwise(owners))
    )


def table(ranks: int, micro_batches: int) -> str:
    """Returns the table without a final line break."""
    columns = ("schedule", "chunks", *(case[0] for case in CASES), "peak", "transfers")
    lines = [columns, ("---",) * len(columns)]
    for name, chunks in ROWS:
        schedule = build(name, ranks=ranks, micro_batches=micro_batches, chunks=chunks)
        schedule.verify()
        peak = max(schedule.simulate().peak_activations) / chunks / schedule.slices
        rates = [rate(schedule, weight_grad, comm) for _, weight_grad, comm in CASES]
        lines.append((f"`{name}`", f"{chunks}", *rates, f"{peak:g}", f"{transfers(schedule)}"))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=16)
    arguments = parser.parse_args()
    print(table(arguments.ranks, arguments.micro_batches))


if __name__ == "__main__":
    main()
