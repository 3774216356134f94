"""Measures what a schedule costs: to build, verify, simulate, draw and lower it, and in memory.

python benchmarks/schedules/schedules.py                        1F1B and ZBV, up to p=64, m=4096
python benchmarks/schedules/schedules.py --names VHalf,Hanayo --sizes 64x1024
"""

from __future__ import annotations

import multiprocessing
import resource
import time

from benchmarks.figures import Figure, parser, report
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


def figures_of(case: Case, found: dict[str, float]) -> list[Figure]:
    """Returns the figures of a case as they are reported."""
    millions = found["actions"] / 1e6
    per_million = {"the command": COMMAND, "all steps": STEPS}
    figures = [Figure(step, [found[step]], "s") for step in STEPS]
    figures += [
        Figure(f"{name}, a million actions", [sum(found[step] for step in steps) / millions], "s")
        for name, steps in per_million.items()
    ]
    figures.append(Figure("peak", [found["peak"]], "MB"))
    title = "{} p={} m={}".format(*case)
    return [figure._replace(name=f"{title}: {figure.name}") for figure in figures]


def sizes(text: str) -> list[tuple[int, int]]:
    """Reads ``16x64,128x1024``: ranks x micro-batches."""
    pairs = [word.split("x") for word in text.split(",")]
    return [(int(ranks), int(micro_batches)) for ranks, micro_batches in pairs]


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--names", default="1F1B,ZBV", help="schedules, each with its own number of chunks"
    )
    options.add_argument("--sizes", type=sizes, default=sizes("16x64,64x256,64x4096"))
    options.add_argument("--repeat", type=int, default=1, help="runs of each size; the best counts")
    arguments = options.parse_args()
    cases = [(name, *size) for name in arguments.names.split(",") for size in arguments.sizes]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        tasks = [pool.apply_async(best, (case, arguments.repeat)) for case in cases]
        results = [figures_of(case, task.get()) for case, task in zip(cases, tasks)]
    report([figure for result in results for figure in result], arguments.json)


if __name__ == "__main__":
    main()
