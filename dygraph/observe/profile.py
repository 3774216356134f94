"""Measures what each layer costs, and each action of each stage: a profile, to plan with.

One micro-batch is on its way at a time, so next to nothing is measured while another rank takes the
processor away. Layers are measured by themselves; then whole stages are, forward and backward, and
the times of a stage's layers are made to add up to the stage's own.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from fleetpipe.dygraph.backward.split import SplitBackward
from fleetpipe.dygraph.batch.losses import Losses
from fleetpipe.dygraph.batch.micro_batches import MicroBatches
from fleetpipe.dygraph.batch.stage import Batch, DygraphStage
from fleetpipe.dygraph.gradients import drop_gradients
from fleetpipe.dygraph.model.pipeline_layer import PipelineLayer
from fleetpipe.dygraph.observe.layer_meter import LayerMeter, Sample, tensor_bytes
from fleetpipe.dygraph.random_keys import random_states_kept
from fleetpipe.engine.engine import Engine
from fleetpipe.engine.trace import Trace
from fleetpipe.job.job import Job
from fleetpipe.planning import LayerCost, Link, Profile
from fleetpipe.schedules import Action, Placement, Schedule, forward_only
from fleetpipe.schedules.forms.events import Event
from fleetpipe.schedules.operations import Recv, Send

#: Batches that are run: the first warms up and is not counted.
BATCHES = 3

#: Least samples of each layer, of which the fastest counts.
LEAST_SAMPLES = 6

#: Most micro-batches of a batch that are measured.
MOST_MICRO_BATCHES = 8


class _StageTimes(NamedTuple):
    """Median seconds of the actions of each stage, by kind, and of a value on an edge."""

    of: Mapping[tuple[str, int], float]
    latency: float


def one_micro_batch(placement: Placement, kinds: str = "IW") -> Schedule:
    """Returns the schedule of a single micro-batch: forward through all stages, and back again.

    Args:
        placement: Which rank has which stage.
        kinds: What each stage does on the way back.
    """
    stages = range(placement.stages)
    order = [
        *(Action("F", stage, 0) for stage in stages),
        *(Action(kind, stage, 0) for stage in reversed(stages) for kind in kinds),
    ]
    rows = tuple(
        tuple(action for action in order if placement.rank_of(action.stage) == rank)
        for rank in range(placement.ranks)
    )
    return Schedule("one-micro-batch", placement, 1, rows)


def measure(
    layers: PipelineLayer, job: Job, data: MicroBatches, weights: list[Fraction]
) -> Profile:
    """Runs some batches one action at a time and returns what they cost, on every rank the same.

    Collective over the pipeline. Parameters, running statistics and the random state are as before
    afterwards; gradients are cleared.

    Args:
        layers: The model.
        job: The job of this process.
        data: The micro-batches of a batch.
        weights: Their weights in the loss.
    """
    run = _Runs(layers, job, data, weights[:MOST_MICRO_BATCHES])
    with _state_kept(layers):
        # By themselves last: then each stage is warm.
        whole, split = run.stages("B"), run.stages("IW")
        samples = run.layers()
    own = {str(number): [list(sample) for sample in found] for number, found in samples.items()}
    sizes = {str(number): list(size) for number, size in _state_bytes(layers).items()}
    everyone = job.group().all_gather((own, sizes))
    profile = None
    if job.group().rank == 0:
        found = {int(n): _typical(s) for part, _ in everyone for n, s in part.items()}
        held = {int(n): size for _, part in everyone for n, size in part.items()}
        profile = _profile(layers, found, held, whole, split).dumps()
    return Profile.loads(job.group().broadcast(profile, 0))


class _Runs:
    """Runs micro-batches one at a time."""

    def __init__(
        self, layers: PipelineLayer, job: Job, data: MicroBatches, weights: list[Fraction]
    ) -> None:
        self._layers, self._job, self._data, self._weights = layers, job, data, weights

    def stages(self, kinds: str) -> _StageTimes:
        """Returns the times of all stages, the same on every rank; collective."""
        layers, job = self._layers, self._job
        schedule = one_micro_batch(layers.placement, kinds)
        split = SplitBackward(schedule, layers.stage_layers)
        stage = DygraphStage(layers.function, layers.placement.stages, split, layers.borders)
        steps = BATCHES * len(self._weights)
        trace = Trace(Path(), schedule, job.connect(), job.group(), most_steps=steps)
        plan = schedule.lower(layers.edges(training=True))
        engine = Engine(plan, stage, job.connect(), job.timeout, (trace,))
        try:
            for _ in range(BATCHES):
                for index, weight in enumerate(self._weights):
                    trace.begin_step()
                    stage.begin(Batch(self._one(index), Losses([layers.loss_fn()], [weight])))
                    engine.run({"REDUCE": lambda: None, "STEP": lambda: None})
                    stage.end()
                    trace.end_step()
        finally:
            stage.end()
        events = [event for step in trace.steps()[len(self._weights) :] for event in step]
        times = stage_times(events) if events else None
        found = job.group().broadcast(times and [list(times.of.items()), times.latency], 0)
        return _StageTimes({(kind, s): seconds for (kind, s), seconds in found[0]}, found[1])

    def layers(self) -> Mapping[int, list[Sample]]:
        """Returns the samples of this process's layers, the loss behind the last; collective."""
        layers, job = self._layers, self._job
        placement, count = layers.placement, len(layers.partition.layers)
        schedule = forward_only(placement, 1)
        meter = LayerMeter(count, layers.calls_of, layers.stage_layers)
        split = SplitBackward(schedule, layers.stage_layers)
        stage = DygraphStage(meter.run_of, placement.stages, split, layers.borders)
        plan = schedule.lower(layers.edges(training=True))
        engine = Engine(plan, stage, job.connect(), job.timeout)
        try:
            for turn in range(max(LEAST_SAMPLES, len(self._weights))):
                one = self._one(turn % len(self._weights))
                batch = Batch(one)
                stage.begin(batch)
                engine.run({})
                stage.end()
                for output in batch.outputs.values():
                    meter.take_loss(count, layers.loss_fn(), output, one.labels[0])
        finally:
            stage.end()
        return meter.samples

    def _one(self, index: int) -> MicroBatches:
        return MicroBatches(*(part and [part[index]] for part in self._data))


def stage_times(events: Iterable[Event]) -> _StageTimes:
    """Returns the medians of what was measured.

    Args:
        events: Actions and transfers of all ranks, in seconds.
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
    latency = max(statistics.median(latencies), 0.0) if latencies else 0.0
    return _StageTimes({key: statistics.median(found) for key, found in durations.items()}, latency)


def _typical(samples: Sequence[Sequence[float]]) -> Sample:
    """Returns the fastest times: what else the machine does slows some, and hastens none."""
    return Sample(*map(min, zip(*samples)))


def _profile(
    layers: PipelineLayer,
    samples: Mapping[int, Sample],
    sizes: Mapping[int, Sequence[int]],
    whole: _StageTimes,
    split: _StageTimes,
) -> Profile:
    """Puts together what was measured."""
    names = [layer.name for layer in layers.partition.layers]
    costs: list[LayerCost] = []
    free = math.inf
    bounds = [*layers.partition.boundaries[:-1], len(names) + 1]
    for stage, (start, end) in enumerate(zip(bounds, bounds[1:])):
        part = [samples[number] for number in range(start, end)]
        forward = _scale(whole.of["F", stage], [sample.forward for sample in part])
        backward = _scale(whole.of["B", stage], [sample.backward for sample in part])
        weight_grad = _scale(split.of["W", stage], [sample.weight_grad for sample in part])
        slower = max(split.of["F", stage] - whole.of["F", stage], 0.0)
        input_grad = _scale(split.of["I", stage] + slower, [sample.input_grad for sample in part])
        for number, one in zip(range(start, end), part):
            parameters, gradients, buffers = sizes.get(number, (0, 0, 0))
            # What the layer before keeps, or one before that, stays.
            releases, free = min(one.releases, free), one.free
            costs.append(
                LayerCost(
                    names[number] if number < len(names) else "loss",
                    one.forward * forward,
                    one.backward * backward,
                    one.input_grad * input_grad,
                    one.weight_grad * weight_grad,
                    parameters=parameters,
                    gradients=gradients,
                    buffers=buffers,
                    output=int(one.output),
                    held=int(one.held),
                    releases=int(releases),
                    held_split=int(one.held_split),
                    waiting=int(one.waiting),
                    working=int(one.working),
                    saved=int(one.saved),
                )
            )
    default = Link()
    crossing = [costs[end - 1].output for end in bounds[1:-1]]
    sizes_sent = statistics.median(crossing) if crossing else 0
    latency = max(whole.latency - default.per_byte * sizes_sent, 0.0) or default.latency
    return Profile(
        tuple(costs[:-1]),
        costs[-1],
        layers.cut_places(),
        (Link(latency),),
        layers.partition.boundaries,
    )


def _scale(measured: float, parts: Sequence[float]) -> float:
    """Returns the factor by which parts add up to what they were measured to take together."""
    total = sum(parts)
    return measured / total if total else 0.0


def _state_bytes(layers: PipelineLayer) -> dict[int, tuple[int, int, int]]:
    """Returns the bytes of parameters, gradients and buffers of this process's layers.

    What several layers share counts with the first of them.
    """
    seen: set[int] = set()
    found: dict[int, tuple[int, int, int]] = {}
    for number, tensors in layers.layer_tensors().items():
        new = {id(tensor): tensor for tensor in tensors if id(tensor) not in seen}
        seen.update(new)
        trained = sum(tensor_bytes(t) for t in new.values() if not t.stop_gradient)
        others = sum(tensor_bytes(t) for t in new.values() if t.stop_gradient)
        found[number] = (trained, trained, others)
    return found


@contextmanager
def _state_kept(layers: PipelineLayer) -> Iterator[None]:
    """Puts buffers and random states back afterwards; drops gradients."""
    values = {name: tensor.clone() for name, tensor in layers.state.own().items()}
    layers.train()
    try:
        with random_states_kept():
            yield
    finally:
        for name, tensor in layers.state.own().items():
            tensor.set_value(values[name])
        drop_gradients(layers.trained_parameters())
