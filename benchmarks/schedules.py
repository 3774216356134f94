"""Measures what a schedule costs: to build, verify, simulate, draw and lower it, and in memory.

python benchmarks/schedules.py                        1F1B and ZBV, up to p=64, m=4096
python benchmarks/schedules.py --names VHalf,Hanayo --sizes 64x1024 --json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from typing import Any

from fleetpipe.schedules import build, render
from fleetpipe.schedules.action import flatten

STEPS = ("build", "verify", "simulate", "draw", "lower", "verify plan")
#: What ``fleetpipe schedule`` does.
COMMAND = STEPS[:4]

Case = tuple[str, int, int]


def measure(name: str, ranks: int, micro_batches: int) -> dict[str, float]:
    """Returns the processor seconds that each step takes, once, and the number of actions."""
    clock = [time.process_time()]
    schedule = build(name, ranks=ranks, micro_batches=micro_batches)
    clock.append(time.process_time())
    schedule.verify()
    clock.append(time.process_time())
    timeline = schedule.simulate()
    clock.append(time.process_time())
    render(timeline)
    clock.append(time.process_time())
    plan = schedule.lower()
    clock.append(time.process_time())
    plan.verify()
    clock.append(time.process_time())
    seconds = {step: end - begin for step, begin, end in zip(STEPS, clock, clock[1:])}
    return {**seconds, "actions": sum(1 for row in schedule.actions for _ in flatten(row))}


def best(case: Case, repeat: int) -> dict[str, float]:
    """Returns the least of each figure over some runs, short ones run more often, and the peak.

    The peak is the most that this process has held, in MB: it has one case to measure.
    """
    name, ranks, micro_batches = case
    count = max(repeat, 10_000 // (ranks * micro_batches))
    runs = [measure(name, ranks, micro_batches) for _ in range(count)]
    found = {key: min(run[key] for run in runs) for key in (*STEPS, "actions")}
    return {**found, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def result_of(case: Case, found: dict[str, float]) -> dict[str, Any]:
    """Returns the figures of a case as they are reported."""
    name, ranks, micro_batches = case
    millions = found["actions"] / 1e6
    return {
        "name": name,
        "ranks": ranks,
        "micro_batches": micro_batches,
        "actions": int(found["actions"]),
        "seconds": {step: found[step] for step in STEPS},
        "command_per_million": sum(found[step] for step in COMMAND) / millions,
        "all_per_million": sum(found[step] for step in STEPS) / millions,
        "peak_megabytes": found["peak"],
    }


def sizes(text: str) -> list[tuple[int, int]]:
    """Reads ``16x64,128x1024``: ranks x micro-batches."""
    pairs = [word.split("x") for word in text.split(",")]
    return [(int(ranks), int(micro_batches)) for ranks, micro_batches in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--names", default="1F1B,ZBV", help="schedules, each with its own number of chunks"
    )
    parser.add_argument("--sizes", type=sizes, default=sizes("16x64,64x256,64x4096"))
    parser.add_argument("--repeat", type=int, default=1, help="runs of each size; the best counts")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    cases = [(name, *size) for name in arguments.names.split(",") for size in arguments.sizes]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        tasks = [pool.apply_async(best, (case, arguments.repeat)) for case in cases]
        results = [result_of(case, task.get()) for case, task in zip(cases, tasks)]
    if arguments.json:
        print(json.dumps({"results": results}))
        return
    print(
        f"seconds of processor time, best of {arguments.repeat} or more; the command does the first"
        f" {len(COMMAND)} steps"
    )
    columns = ("schedule", "ranks", "m", "actions", *STEPS, "command/1M", "all/1M", "peak MB")
    print("  ".join(f"{column:>11}" for column in columns))
    for result in results:
        figures = [
            *(f"{result[key]}" for key in ("name", "ranks", "micro_batches", "actions")),
            *(f"{seconds:.3f}" for seconds in result["seconds"].values()),
            *(f"{result[key]:.2f}" for key in ("command_per_million", "all_per_million")),
            f"{result['peak_megabytes']:.0f}",
        ]
        print("  ".join(f"{figure:>11}" for figure in figures))


if __name__ == "__main__":
    main()
