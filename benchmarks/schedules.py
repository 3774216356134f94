"""Measures what building, verifying, simulating and lowering a schedule costs.

python benchmarks/schedules.py                        1F1B: p=128, m=1024, and growth at m=4p
python benchmarks/schedules.py --name ZBV --sizes 128x1024 --json
"""

from __future__ import annotations

import argparse
import json
import time

from fleetpipe.schedules import build
from fleetpipe.schedules.action import flatten

STEPS = ("build", "verify", "simulate", "lower", "verify plan")
CORE = STEPS[:3]


def measure(name: str, ranks: int, micro_batches: int) -> dict[str, float]:
    """Returns the processor seconds that each step takes, once, and the number of actions."""
    clock = [time.process_time()]
    schedule = build(name, ranks=ranks, micro_batches=micro_batches)
    clock.append(time.process_time())
    schedule.verify()
    clock.append(time.process_time())
    schedule.simulate()
    clock.append(time.process_time())
    plan = schedule.lower()
    clock.append(time.process_time())
    plan.verify()
    clock.append(time.process_time())
    seconds = {step: end - begin for step, begin, end in zip(STEPS, clock, clock[1:])}
    return {**seconds, "actions": sum(1 for row in schedule.actions for _ in flatten(row))}


def best(name: str, ranks: int, micro_batches: int, repeat: int) -> dict[str, float]:
    """Returns the least seconds of each step over some runs, short ones run more often."""
    count = max(repeat, 10_000 // (ranks * micro_batches))
    runs = [measure(name, ranks, micro_batches) for _ in range(count)]
    return {key: min(run[key] for run in runs) for key in (*STEPS, "actions")}


def sizes(text: str) -> list[tuple[int, int]]:
    """Reads ``16x64,128x1024``: ranks x micro-batches."""
    pairs = [word.split("x") for word in text.split(",")]
    return [(int(ranks), int(micro_batches)) for ranks, micro_batches in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--name", default="1F1B", help="a schedule, with its own number of chunks")
    parser.add_argument("--sizes", type=sizes, default=sizes("16x64,64x256,128x1024,256x1024"))
    parser.add_argument("--repeat", type=int, default=3, help="runs of each size; the best counts")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = []
    for ranks, micro_batches in arguments.sizes:
        seconds = best(arguments.name, ranks, micro_batches, arguments.repeat)
        actions = int(seconds.pop("actions"))
        core = sum(seconds[step] for step in CORE)
        results.append(
            {
                "ranks": ranks,
                "micro_batches": micro_batches,
                "actions": actions,
                "seconds": seconds,
                "build_verify_simulate": core,
                "microseconds_per_action": core / actions * 1e6,
                "lower_and_verify_microseconds_per_action": (
                    (sum(seconds.values()) - core) / actions * 1e6
                ),
            }
        )
    if arguments.json:
        print(json.dumps({"name": arguments.name, "results": results}))
        return
    print(f"{arguments.name}: seconds of processor time, best of {arguments.repeat} or more")
    columns = ("ranks", "m", "actions", *STEPS, "first three", "us/action", "last two us/action")
    print("  ".join(f"{column:>11}" for column in columns))
    for result in results:
        figures = [
            *(f"{result[key]}" for key in ("ranks", "micro_batches", "actions")),
            *(f"{result['seconds'][step]:.3f}" for step in STEPS),
            f"{result['build_verify_simulate']:.3f}",
            f"{result['microseconds_per_action']:.2f}",
            f"{result['lower_and_verify_microseconds_per_action']:.2f}",
        ]
        print("  ".join(f"{figure:>11}" for figure in figures))


if __name__ == "__main__":
    main()
