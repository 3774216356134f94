"""Measures what each action of each stage costs, for ``fleetpipe schedule --costs FILE``.

One micro-batch is on its way at a time: all forwards, stage after stage, then I and W of each stage
back again. So next to nothing is measured while another rank takes the processor away.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Union

from fleetpipe.dygraph._paddle import allocated_bytes
from fleetpipe.dygraph.backward.split import SplitBackward
from fleetpipe.dygraph.batch.losses import Losses
from fleetpipe.dygraph.batch.micro_batches import MicroBatches
from fleetpipe.dygraph.batch.stage import Batch, DygraphStage
from fleetpipe.dygraph.gradients import drop_gradients
from fleetpipe.dygraph.model.pipeline_layer import PipelineLayer
from fleetpipe.dygraph.random_keys import random_states_kept
from fleetpipe.engine.engine import Engine
from fleetpipe.engine.observer import Blocked, Instruction, Played
from fleetpipe.engine.trace import Trace
from fleetpipe.job.job import Job
from fleetpipe.schedules import Action, Op, Placement, Schedule
from fleetpipe.schedules.forms.events import Event
from fleetpipe.schedules.operations import Recv, Send

#: Batches that are run: the first warms up and is not counted.
BATCHES = 3

#: Costs in the form of ``Costs.from_json``: seconds, and bytes that a forward holds.
Measured = dict[str, Union[float, list[float]]]


def one_micro_batch(placement: Placement) -> Schedule:
    """Returns the schedule of a single micro-batch: forward through all stages, then I and W."""
    stages = range(placement.stages)
    order = [
        *(Action("F", stage, 0) for stage in stages),
        *(Action(kind, stage, 0) for stage in reversed(stages) for kind in "IW"),
    ]
    rows = tuple(
        tuple(action for action in order if placement.rank_of(action.stage) == rank)
        for rank in range(placement.ranks)
    )
    return Schedule("one-micro-batch", placement, 1, rows)


class WeighedForwards:
    """An observer of the engine that notes how many bytes each forward leaves allocated."""

    def __init__(self) -> None:
        """Begins without any."""
        self.bytes: defaultdict[int, list[int]] = defaultdict(list)

    def wrap(self, played: Played, op: Op, instruction: Instruction) -> Instruction:
        """See :class:`fleetpipe.engine.observer.Observer`."""
        if not isinstance(op, Action) or op.kind != "F":
            return instruction
        sizes = self.bytes[op.stage]

        def weighed() -> Blocked | None:
            before = allocated_bytes()
            blocked = instruction()
            sizes.append(max(allocated_bytes() - before, 0))
            return blocked

        return weighed


def costs(events: Iterable[Event], held: Mapping[int, float], stages: int) -> Measured:
    """Returns the medians of what was measured.

    Args:
        events: Actions and transfers of all ranks, in seconds.
        held: Bytes that a forward of each stage leaves allocated.
        stages: Number of stages.
    """
    durations: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    sent: dict[str, float] = {}
    arrived: dict[str, float] = {}
    for event in events:
        for action in event.actions:
            durations[action.kind, action.stage].append(event.end - event.start)
        if isinstance(event.op, Send):
            sent[event.name[1:]] = event.start
        elif isinstance(event.op, Recv):
            arrived[event.name[1:]] = event.end
    # In this schedule the receiver is waiting already: what passes is the latency of the edge.
    latencies = [arrived[name] - start for name, start in sent.items() if name in arrived]
    kinds = {"forward": "F", "input_grad": "I", "weight_grad": "W"}
    return {
        **{
            name: [statistics.median(durations[kind, stage]) for stage in range(stages)]
            for name, kind in kinds.items()
        },
        "comm": max(statistics.median(latencies), 0.0) if latencies else 0.0,
        "bytes": [held[stage] for stage in range(stages)],
    }


def measure(
    layers: PipelineLayer, job: Job, data: MicroBatches, weights: list[Fraction]
) -> Measured:
    """Runs some batches one action at a time and returns what they cost, on every rank the same.

    Collective over the pipeline. Parameters, running statistics and the random state are as before
    afterwards; gradients are cleared.

    Args:
        layers: The model.
        job: The job of this process.
        data: The micro-batches of a batch.
        weights: Their weights in the loss.
    """
    schedule = one_micro_batch(layers.placement)
    plan = schedule.lower(layers.edges(training=True))
    split = SplitBackward(schedule, layers.stage_layers)
    stage = DygraphStage(layers.function, layers.placement.stages, split, layers.borders)
    weighed = WeighedForwards()
    batches = BATCHES * len(weights)
    trace = Trace(Path(), schedule, job.connect(), job.group(), most_steps=batches)
    engine = Engine(plan, stage, job.connect(), job.timeout, (weighed, trace))
    nothing = {"REDUCE": lambda: None, "STEP": lambda: None}
    with _state_kept(layers, stage):
        for index in [index for _ in range(BATCHES) for index in range(len(weights))]:
            one = MicroBatches(*(part and [part[index]] for part in data))
            trace.begin_step()
            stage.begin(Batch(one, Losses([layers.loss_fn()], [weights[index]])))
            engine.run(nothing)
            stage.end()
            trace.end_step()
    held = {str(stage): statistics.median(sizes) for stage, sizes in weighed.bytes.items()}
    everyone = {int(s): size for part in job.group().all_gather(held) for s, size in part.items()}
    events = [event for step in trace.steps()[len(weights) :] for event in step]
    medians = costs(events, everyone, layers.placement.stages) if events else None
    measured: Measured = job.group().broadcast(medians, 0)
    return measured


@contextmanager
def _state_kept(layers: PipelineLayer, stage: DygraphStage) -> Iterator[None]:
    """Puts buffers and random states back afterwards; drops gradients and what the stage holds."""
    values = {name: tensor.clone() for name, tensor in layers.state.own().items()}
    layers.train()
    try:
        with random_states_kept():
            yield
    finally:
        stage.end()
        for name, tensor in layers.state.own().items():
            tensor.set_value(values[name])
        drop_gradients(layers.trained_parameters())
