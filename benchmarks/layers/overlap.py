"""Steps of a pipeline with experts whose exchanges take a while, with overlap and without.

    OMP_NUM_THREADS=1 python benchmarks/layers/overlap.py [--work 30] [--delay 15] [--rounds 2]

Four processes, DualPipeV with pp 2 x ep 2 and eight micro-batches. The layers of a stage wait for
``--work`` milliseconds before their experts and in them, twice as long in a backward, as on a
device of their own; an exchange arrives ``--delay`` milliseconds after it was sent. Seconds of a
step on the slowest rank, both ways in turn; with the delay and without, and what the simulation
of the schedule says that the delay adds.
"""

from __future__ import annotations

import statistics
import time

from benchmarks.figures import Figure, answer, is_rank, on_ranks, parser, report
from fleetpipe.schedules import Costs, build
from tests.processes.pipeline import overlap_worker as worker

STEPS, MICRO_BATCHES = 3, 8
WAYS = ("one half after the other", "overlap")
#: Exchanges of a mixture, in forward and in backward.
FORWARD, BACKWARD = 3, 2


def timed(work: float, delay: float, rounds: int) -> list[list[float]]:
    """Returns the seconds of steps on a rank, without overlap and with it."""
    worker.MICRO_BATCHES = MICRO_BATCHES
    times: list[list[float]] = [[], []]
    for overlap in [False, True] * rounds:
        with worker.job(overlap, delay) as running:
            pipe, optimizer = worker.built(work)
            for step in range(STEPS):
                data = worker.part(running, step)
                begin = time.perf_counter()
                pipe.train_batch(data, optimizer)
                # The first step loads code.
                times[overlap] += [time.perf_counter() - begin] * (step > 0)
    return times


def simulated(work: float, delay: float, overlap: bool) -> float:
    """Returns the seconds of a step by the schedule alone."""
    backward = 4 * work + BACKWARD * delay
    costs = Costs(
        forward=2 * work + FORWARD * delay,
        input_grad=backward,
        weight_grad=0,
        exchange=overlap * delay * (FORWARD + BACKWARD) / 2,
    )
    return build("DualPipeV", ranks=2, micro_batches=MICRO_BATCHES).simulate(costs).makespan


def main() -> None:
    """Measures and prints."""
    options = parser(__doc__)
    options.add_argument("--work", type=float, default=30.0)
    options.add_argument("--delay", type=float, default=15.0)
    options.add_argument("--rounds", type=int, default=2)
    arguments = options.parse_args()
    work, delay = arguments.work / 1e3, arguments.delay / 1e3
    if is_rank():
        answer([timed(work, seconds, arguments.rounds) for seconds in (0.0, delay)])
        return
    ranks = on_ranks(4)
    figures = []
    for overlap, way in enumerate(WAYS):
        steps = [[max(times) for times in zip(*(r[k][overlap] for r in ranks))] for k in (0, 1)]
        plain, delayed = (statistics.median(times) for times in steps)
        added = simulated(work, delay, bool(overlap)) - simulated(work, 0.0, bool(overlap))
        figures += [
            Figure(f"{way}, no delay", steps[0], "s"),
            Figure(f"{way}, {arguments.delay:g} ms", steps[1], "s"),
            Figure(f"{way}, added by it", [delayed - plain], "s"),
            Figure(f"{way}, added in the simulation", [added], "s"),
        ]
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
