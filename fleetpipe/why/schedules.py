"""What the steps of a trace would have taken under another schedule, or with stages of one size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fleetpipe.schedules import Costs, SliceNumber, build
from fleetpipe.why.operations import COMMUNICATIONS, TRANSFERS
from fleetpipe.why.replay import ReplayedStep

#: Schedules of one model part on each rank that are tried; W of a whole backward is half of it.
NAMES = ("FThenB", "1F1B", "ZBH1", "ZBH2")


class Alternative(NamedTuple):
    """A step as another schedule would have it.

    Attributes:
        name: The schedule.
        seconds: Of a step, with the measured costs of each stage.
        even: Of a step, if all stages cost the same.
    """

    name: str
    seconds: float
    even: float


def alternatives(steps: Sequence[ReplayedStep]) -> list[Alternative]:
    """Simulates schedules on the mean costs of a trace's stages, the fastest first.

    Returns:
        Nothing for a trace of several model parts on a rank, of fused actions, of slices, or
        where a rank computed nothing.
    """
    times: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    moved: list[float] = []
    for step in steps:
        for one, seconds in zip(step.operations, step.transfer_times):
            if one.kind in TRANSFERS:
                moved.append(float(seconds))
            elif one.kind not in COMMUNICATIONS:
                sliced = isinstance(one.micro_batch, SliceNumber)
                if sliced or one.part != one.stage or "|" in one.kind:
                    return []
                times[one.kind, one.stage].append(float(seconds))
    ranks = len({stage for _, stage in times})
    if any(stage >= ranks for _, stage in times):
        return []
    micro_batches = len({one.micro_batch for step in steps for one in step.operations})
    mean = {place: float(np.mean(values)) for place, values in times.items()}
    forward = [mean.get(("F", stage), 0.0) for stage in range(ranks)]
    whole = [mean.get(("B", stage), 0.0) for stage in range(ranks)]
    input_grad = [mean.get(("I", stage), whole[stage] / 2) for stage in range(ranks)]
    weight_grad = [mean.get(("W", stage), whole[stage] / 2) for stage in range(ranks)]
    comm = float(np.median(moved)) if moved else 0.0

    def step_time(name: str, costs: Sequence[Sequence[float]]) -> float:
        schedule = build(name, ranks=ranks, micro_batches=micro_batches)
        forward, input_grad, weight_grad = map(tuple, costs)
        measured = Costs(forward, input_grad, weight_grad, comm=comm)
        return float(schedule.simulate(measured).makespan)

    costs = (forward, input_grad, weight_grad)
    even = [[float(np.mean(part))] * ranks for part in costs]
    simulated = [Alternative(name, step_time(name, costs), step_time(name, even)) for name in NAMES]
    return sorted(simulated, key=lambda one: one.seconds)
