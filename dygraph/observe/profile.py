"""Measures what each layer costs, and each action of each stage: a profile, to plan with.

Whole stages run as in a real batch: several micro-batches in flight, forward and backward in turn,
all ranks at once, so that caches, memory and links are as they will be. Layers are measured by
themselves, and the times of a stage's layers are made to add up to the stage's own.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Callable

from fleetpipe.dygraph.backward.split import SplitBackward
from fleetpipe.dygraph.batch.losses import Losses
from fleetpipe.dygraph.batch.micro_batches import MicroBatches
from fleetpipe.dygraph.batch.stage import Batch, DygraphStage
from fleetpipe.dygraph.gradients import drop_gradients
from fleetpipe.dygraph.model.pipeline_layer import PipelineLayer
from fleetpipe.dygraph.observe.action_meter import ActionMeter, Doing
from fleetpipe.dygraph.observe.layer_meter import LayerMeter, Sample, tensor_bytes
from fleetpipe.dygraph.random_keys import random_states_kept
from fleetpipe.engine.engine import Engine
from fleetpipe.engine.observer import Observer
from fleetpipe.engine.trace import Trace
from fleetpipe.job.job import Job
from fleetpipe.planning import LayerCost, Link, Profile, Transfer
from fleetpipe.schedules import Action, Placement, Schedule, forward_only
from fleetpipe.schedules.forms.events import Event
from fleetpipe.schedules.operations import Recv, Send
from fleetpipe.transport.joining.hosts import host_identity

#: Batches that are run: the first ones warm up and are not counted.
BATCHES, COLD = 7, 2

#: What transfers keep ranks busy with where one process measures, which has none.
TYPICAL = Transfer(sending=7e-5, receiving=9e-5, per_byte=6e-10)

#: Least samples of each layer, of which the fastest counts.
LEAST_SAMPLES = 6

#: Most micro-batches of a batch that are measured.
MOST_MICRO_BATCHES = 8

#: Seconds of a micro-batch by stage: its actions by kind, its sends ("S"), its receives ("R").
_StageTimes = Mapping[Doing, float]


def in_turn(placement: Placement, micro_batches: int, kinds: str) -> Schedule:
    """Returns a schedule in which each stage runs forward and backward in turn, on any placement.

    As many micro-batches are in flight as there are stages. With one stage on a rank it is 1F1B.

    Args:
        placement: Which rank has which stage.
        micro_batches: Micro-batches of a batch, m.
        kinds: What each stage does on the way back: B, or I and then W.
    """
    stages = placement.stages
    # Every action at a time after those that it waits for.
    timed = [
        *((s + 2 * k, Action("F", s, k)) for k in range(micro_batches) for s in range(stages)),
        *(
            (2 * stages - 1 - s + 2 * k, Action(kind, s, k))
            for k in range(micro_batches)
            for s in range(stages)
            for kind in kinds
        ),
    ]
    timed.sort(key=lambda pair: pair[0])
    rows = tuple(
        tuple(action for _, action in timed if placement.rank_of(action.stage) == rank)
        for rank in range(placement.ranks)
    )
    return Schedule("in-turn", placement, micro_batches, rows)


def measure(
    layers: PipelineLayer, job: Job, data: MicroBatches, weights: list[Fraction]
) -> Profile:
    """Runs some batches and returns what their parts cost, on every rank the same.

    Collective over the job. Parameters, running statistics and the random state are as before
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
        latency = run.latency()
        whole, split = run.stages("B"), run.stages("IW")
        samples = run.layers()
    own = {str(number): [list(sample) for sample in found] for number, found in samples.items()}
    sizes = {str(number): list(size) for number, size in _state_bytes(layers).items()}
    everyone = job.group().all_gather((own, sizes))
    profile = None
    if job.group().rank == 0:
        found = {int(n): _typical(s) for part, _ in everyone for n, s in part.items()}
        held = {int(n): size for _, part in everyone for n, size in part.items()}
        profile = _profile(layers, found, held, whole, split, latency).dumps()
    return Profile.loads(job.group().broadcast(profile, 0))


class _Runs:
    """Runs the parts of a model."""

    def __init__(
        self, layers: PipelineLayer, job: Job, data: MicroBatches, weights: list[Fraction]
    ) -> None:
        self._layers, self._job, self._weights = layers, job, weights
        self._data = MicroBatches(*(part and part[: len(weights)] for part in data))

    def stages(self, kinds: str) -> _StageTimes:
        """Returns the median times of all stages, the same on every rank; collective."""
        meter = ActionMeter(kinds[-1], clock_for(self._job))
        schedule = in_turn(self._layers.placement, len(self._weights), kinds)
        engine, stage = self._engine(schedule, meter)
        for turn in range(BATCHES):
            self._run(engine, stage, self._data, self._weights)
            meter.end_batch(turn >= COLD)
        merged: dict[Doing, float] = {}
        for part in self._job.group().all_gather(list(meter.seconds().items())):
            merged.update({(kind, number): seconds for (kind, number), seconds in part})
        return {doing: seconds / len(self._weights) for doing, seconds in merged.items()}

    def latency(self) -> float | None:
        """Returns the seconds that a message is on its way while no rank is busy; collective.

        One micro-batch is on its way at a time: whoever is to receive waits already. None where
        one process plays all ranks.
        """
        job, crossings = self._job, len(_crossed(self._layers.placement))
        if job.group().ranks == 1 or not crossings:
            return None
        schedule = in_turn(self._layers.placement, 1, "B")
        trace = Trace(Path(), schedule, job.connect(), job.group())
        meter = ActionMeter("B")
        engine, stage = self._engine(schedule, trace, meter)
        for index, weight in enumerate(self._weights):
            trace.begin_step()
            self._run(engine, stage, self._one(index), [weight])
            trace.end_step()
            meter.end_batch(counts=True)
        own = sum(seconds for (kind, _), seconds in meter.seconds().items() if kind in "SR")
        busy = sum(job.group().all_gather(own)) / (2 * crossings)
        found = [seconds for step in trace.steps() for seconds in latencies(step)]
        whole: float = job.group().broadcast(statistics.median(found) if found else 0.0, 0)
        return max(whole - busy, 0.0)

    def _engine(self, schedule: Schedule, *observers: Observer) -> tuple[Engine, DygraphStage]:
        layers, job = self._layers, self._job
        split = SplitBackward(schedule, layers.stage_layers)
        stage = DygraphStage(layers.function, layers.placement.stages, split, layers.borders)
        plan = schedule.lower(layers.edges(training=True))
        return Engine(plan, stage, job.connect(), job.timeout, observers), stage

    def _run(
        self, engine: Engine, stage: DygraphStage, data: MicroBatches, weights: list[Fraction]
    ) -> None:
        """Runs a batch, and adds to the gradients."""
        stage.begin(Batch(data, Losses([self._layers.loss_fn()], weights)))
        try:
            engine.run({"REDUCE": lambda: None, "STEP": lambda: None})
        finally:
            stage.end()

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


def clock_for(job: Job) -> Callable[[], float]:
    """Returns what measures actions; collective over the job.

    Where a host has fewer processors than ranks, that is the processor time of the thread: by the
    clock, ranks would wait for each other's processors.
    """
    ranks = job.everyone().all_gather((host_identity(), len(os.sched_getaffinity(0))))
    hosts = Counter(host for host, _ in ranks)
    shared = any(hosts[host] > processors for host, processors in ranks)
    return time.thread_time if shared else time.perf_counter


def latencies(events: Iterable[Event]) -> list[float]:
    """Returns the seconds from the begin of each send to the end of its receive.

    Args:
        events: Transfers of all ranks in a step, in seconds.
    """
    sent: dict[str, float] = {}
    arrived: dict[str, float] = {}
    for event in events:
        if isinstance(event.op, Send):
            sent[event.name[1:]] = event.start
        elif isinstance(event.op, Recv):
            arrived[event.name[1:]] = event.end
    return [arrived[name] - start for name, start in sent.items()]


def _typical(samples: Sequence[Sequence[float]]) -> Sample:
    """Returns the fastest times: what else the machine does slows some, and hastens none."""
    return Sample(*map(min, zip(*samples)))


def _profile(
    layers: PipelineLayer,
    samples: Mapping[int, Sample],
    sizes: Mapping[int, Sequence[int]],
    whole: _StageTimes,
    split: _StageTimes,
    latency: float | None,
) -> Profile:
    """Puts together what was measured."""
    names = [layer.name for layer in layers.partition.layers]
    costs: list[LayerCost] = []
    free = math.inf
    bounds = [*layers.partition.boundaries[:-1], len(names) + 1]
    for stage, (start, end) in enumerate(zip(bounds, bounds[1:])):
        part = [samples[number] for number in range(start, end)]
        forward = _scale(whole["F", stage], [sample.forward for sample in part])
        backward = _scale(whole["B", stage], [sample.backward for sample in part])
        weight_grad = _scale(split["W", stage], [sample.weight_grad for sample in part])
        slower = max(split["F", stage] - whole["F", stage], 0.0)
        input_grad = _scale(split["I", stage] + slower, [sample.input_grad for sample in part])
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
    stages = [costs[end - 1].output for end in bounds[1:-1]]
    link, transfer = between_ranks(layers.placement, whole, stages, latency)
    return Profile(
        tuple(costs[:-1]),
        costs[-1],
        layers.cut_places(),
        (link,),
        layers.partition.boundaries,
        transfer,
    )


def between_ranks(
    placement: Placement, whole: _StageTimes, outputs: Sequence[int], latency: float | None
) -> tuple[Link, Transfer]:
    """Returns what values cost that cross between ranks; what is typical where none did.

    Args:
        placement: Which rank has which stage.
        whole: What stages took.
        outputs: Bytes that leave each stage but the last.
        latency: Seconds that a message is on its way; None where nothing was sent.
    """
    if latency is None:
        return Link(), TYPICAL
    sizes = [outputs[stage] for stage in _crossed(placement)]
    copying = TYPICAL.per_byte * statistics.mean(sizes)
    # Each micro-batch crosses twice: as a value, and as its gradient.
    sending, receiving = (
        sum(seconds for (kind, _), seconds in whole.items() if kind == way) / (2 * len(sizes))
        for way in "SR"
    )
    fixed = max(sending - copying, 0.0), max(receiving - copying, 0.0)
    return Link(latency, 0.0), Transfer(*fixed, TYPICAL.per_byte)


def _crossed(placement: Placement) -> list[int]:
    """Returns the stages whose values go to another rank."""
    rank_of = placement.rank_of
    return [s for s in range(placement.stages - 1) if rank_of(s) != rank_of(s + 1)]


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
