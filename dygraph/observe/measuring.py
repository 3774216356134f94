"""Runs stages, messages and single layers of a model to measure their time and memory.

Stages run as in a real batch, so that caches, memory and links are as busy: several micro-batches
are in flight, forwards and backwards alternate, and all ranks run at once. A unit is a micro-batch,
or a sequence chunk of one if the schedule cuts sequences. Start with :class:`Runs`.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from fleetpipe import systems
from fleetpipe.aliases import Nest, Tensor
from fleetpipe.dygraph.batch.dygraph_stage import DygraphStage
from fleetpipe.dygraph.batch.losses import Criterion, Losses
from fleetpipe.dygraph.batch.micro_batches import MicroBatches
from fleetpipe.dygraph.batch.stage_interfaces import Batch, RunOf
from fleetpipe.dygraph.batch.units import WHOLE, Units
from fleetpipe.dygraph.model.pipeline_layer import PipelineLayer
from fleetpipe.dygraph.observe.layer_meter import LayerMeter, Sample
from fleetpipe.engine.engine import Engine
from fleetpipe.engine.observer import Blocked, Instruction, Observer, Played, Stopwatch
from fleetpipe.engine.trace import Trace
from fleetpipe.job.job import Job
from fleetpipe.mesh.groups import Group
from fleetpipe.paddle_api.device import allocated_bytes, device_clock, device_kind, reserved_bytes
from fleetpipe.profiling import ProcessMemory
from fleetpipe.schedules import Action, Free, Op, Placement, Recv, Schedule, Send, forward_only
from fleetpipe.schedules.action import micro_batch_numbers
from fleetpipe.schedules.forms.trace import Event
from fleetpipe.transport.hosts import host_name

#: What one operation of a plan does: the kind of an action, or "S" for a send and "R" for a
#: receive; the global stage; and the number of the unit in its micro-batch.
Work = tuple[str, int, int]

#: The number of batches that are run, and how many of them, the first ones, are not counted.
BATCHES, WARM_UP_BATCHES = 7, 2

#: The least number of times that each layer is measured; the fastest counts.
LEAST_SAMPLES = 6

#: The seconds that each work takes for a micro-batch.
StageTimes = Mapping[Work, float]

#: The samples of each layer, by the number of the unit in its micro-batch and the number of the
#: layer.
Samples = Mapping[tuple[int, int], list[Sample]]


class _UsedMemory(NamedTuple):
    """The bytes of all live tensors, and of the process in the system's view, at one moment."""

    tensors: int
    process: int

    @classmethod
    def now(cls) -> _UsedMemory:
        """Returns the bytes that tensors and the process use now."""
        return cls(allocated_bytes(), reserved_bytes())


class MemoryMeter:
    """An observer of the engine that measures the largest memory after any action."""

    def __init__(self) -> None:
        """Measures the memory before the first batch, when only the model is there."""
        self._at_start = _UsedMemory.now()
        self._maximum = self._at_start

    def wrap(self, played: Played, op: Op, instruction: Instruction) -> Instruction:
        """Returns an action of the plan that measures the memory afterwards."""
        if not isinstance(op, Action):
            return instruction

        def measured() -> Blocked | None:
            """Runs the action; once it has run, records the largest memory so far."""
            blocked = instruction()
            if blocked is None:
                now = _UsedMemory.now()
                self._maximum = _UsedMemory(*map(max, self._maximum, now))
            return blocked

        return measured

    def result(self) -> ProcessMemory | None:
        """Returns how the memory of the process depends on its tensors; None if that is unknown."""
        base = self._at_start.process - self._at_start.tensors
        if self._at_start.process <= 0 or base < 0 or self._maximum.tensors <= 0:
            return None
        growth = (self._maximum.process - base) / self._maximum.tensors
        return ProcessMemory(float(base), max(growth, 1.0))


class ActionMeter:
    """An observer of the engine that adds up the seconds of each kind of work in a batch.

    The time of a release counts for the last action of its stage. The time of a receive does not
    include its wait.
    """

    def __init__(
        self, last: str, clock: Callable[[], float] = time.perf_counter, units: int = 1
    ) -> None:
        """Starts before the first batch.

        Args:
            last: The kind of action after which a stage releases a micro-batch: "B", or "W".
            clock: Returns the time in seconds.
            units: The number of units of a micro-batch.
        """
        self._last_kind, self._clock, self._units = last, clock, units
        self._seconds: defaultdict[Work, float] = defaultdict(float)
        self._batches: defaultdict[Work, list[float]] = defaultdict(list)

    def wrap(self, played: Played, op: Op, instruction: Instruction) -> Instruction:
        """Returns an operation of the plan with a clock around it, if it is measured."""
        if isinstance(op, Action):
            kind, stage = op.kind, op.stage
        elif isinstance(op, Free):
            kind, stage = self._last_kind, op.stage
        elif isinstance(op, Send):
            kind, stage = "S", op.edge.source if op.kind == "F" else op.edge.target
        elif isinstance(op, Recv):
            kind, stage = "R", op.edge.target if op.kind == "F" else op.edge.source
        else:
            return instruction
        work = kind, stage, op.micro_batch % self._units
        # While it waits for another rank, a thread does not use its processor.
        clock = time.thread_time if isinstance(op, (Send, Recv)) else self._clock

        def add(begin: float, end: float) -> None:
            self._seconds[work] += end - begin

        return Stopwatch(instruction, add, clock)

    def end_batch(self, counts: bool) -> None:
        """Ends a batch, and stores its seconds if ``counts``, which is False for a warm-up."""
        if counts:
            for work, seconds in self._seconds.items():
                self._batches[work].append(seconds)
        self._seconds.clear()

    def seconds(self) -> dict[Work, float]:
        """Returns the seconds of each work in a batch, all micro-batches together: medians."""
        return {work: statistics.median(samples) for work, samples in self._batches.items()}


def in_turn(placement: Placement, micro_batches: int, kinds: str, slices: int = 1) -> Schedule:
    """Returns a schedule in which each stage runs one forward and one backward in turn.

    It runs on any placement. There are as many micro-batches in flight as stages. With one stage on
    each rank it is 1F1B; with sequence chunks it is Seq1F1B, whose backwards run from the last
    chunk of a micro-batch to the first.

    Args:
        placement: The rank of each stage.
        micro_batches: The number of micro-batches of a batch, m.
        kinds: The actions of each backward: "B", or "IW" for I and then W.
        slices: The number of sequence chunks of each micro-batch.
    """
    stages, units = placement.stages, micro_batch_numbers(micro_batches, slices)
    firsts = range(0, len(units), slices)
    backwards = [unit for first in firsts for unit in units[first : first + slices][::-1]]
    # The first backward waits for all chunks of its micro-batch.
    begin = 2 * (slices - 1)
    # Each action gets a time after those of the actions for which it waits; then they are sorted.
    timed = [
        *((s + 2 * k, Action("F", s, unit)) for k, unit in enumerate(units) for s in range(stages)),
        *(
            (begin + 2 * stages - 1 - s + 2 * k, Action(kind, s, unit))
            for k, unit in enumerate(backwards)
            for s in range(stages)
            for kind in kinds
        ),
    ]
    timed.sort(key=lambda pair: pair[0])
    rows = tuple(
        tuple(action for _, action in timed if placement.rank_of(action.stage) == rank)
        for rank in range(placement.ranks)
    )
    return Schedule("in-turn", placement, micro_batches, rows, slices=slices)


class Runs:
    """Runs a model's stages, messages and layers repeatedly, to measure them."""

    def __init__(
        self, layers: PipelineLayer, job: Job, data: MicroBatches, weights: list[Fraction]
    ) -> None:
        """Stores the model and its data.

        Args:
            layers: The model.
            job: The job of this process.
            data: The micro-batches of this process, if it has any; the first of them are run.
            weights: The weights in the loss of the micro-batches to run.
        """
        self._layers, self._job, self._weights = layers, job, weights
        self._data = MicroBatches(*(values and values[: len(weights)] for values in data))

    def lengths(self, units: Units) -> list[int]:
        """Returns the sequence length of each unit; empty in a process without data."""
        values = next((values for values in self._data if values), None)
        return [] if values is None else units.lengths(values[0])

    def stages(self, kinds: str, units: Units = WHOLE) -> StageTimes:
        """Measures the actions of all stages, and returns the same times on every rank. Collective.

        Args:
            kinds: The actions of each backward: "B", or "IW".
            units: Cuts micro-batches into units.
        """
        count = len(self._weights)
        meter = ActionMeter(kinds[-1], clock_for(self._job), units.count)
        schedule = in_turn(self._layers.placement, count, kinds, units.count)
        engine, stage = self._new_engine(schedule, None, meter)
        for turn in range(BATCHES):
            batch = self._new_batch(self._data, self._weights, units)
            _run_batch(engine, stage, batch, units)
            meter.end_batch(turn >= WARM_UP_BATCHES)
        merged: dict[Work, float] = {}
        for of_rank in self._job.group().all_gather(list(meter.seconds().items())):
            merged.update({(kind, s, unit): seconds for (kind, s, unit), seconds in of_rank})
        for of_rank in computing_together(self._job).all_gather(list(merged.items())):
            for (kind, s, unit), seconds in of_rank:
                merged[kind, s, unit] = max(seconds, merged[kind, s, unit])
        return {work: seconds / count for work, seconds in merged.items()}

    def process(self) -> ProcessMemory | None:
        """Measures the memory of a process beside its tensors, the most of any rank. Collective.

        Returns None if the system of a rank does not tell the memory of a process.
        """
        schedule = in_turn(self._layers.placement, len(self._weights), "B")
        meter = MemoryMeter()
        engine, stage = self._new_engine(schedule, None, meter)
        for _ in range(WARM_UP_BATCHES):
            _run_batch(engine, stage, self._new_batch(self._data, self._weights))
        result = meter.result()
        ranks = self._job.group().all_gather(None if result is None else list(result))
        measured = [figures for figures in ranks if figures is not None]
        if len(measured) < len(ranks):
            return None
        return ProcessMemory(*map(max, zip(*measured)))

    def latency(self) -> float | None:
        """Measures the seconds that a message takes while no rank is busy. Collective.

        Only one micro-batch runs at a time, so the receiver already waits. Returns None if one
        process plays all ranks.
        """
        layers, job = self._layers, self._job
        crossings = len(crossing_stages(layers.placement))
        if job.group().ranks == 1 or not crossings:
            return None
        schedule = in_turn(layers.placement, 1, "B")
        trace = Trace(Path(), schedule, job.connect(), job.group())
        meter = ActionMeter("B")
        engine, stage = self._new_engine(schedule, None, trace, meter)
        for index, weight in enumerate(self._weights):
            trace.begin_step()
            _run_batch(engine, stage, self._new_batch(self._micro_batch(index), [weight]))
            trace.end_step()
            meter.end_batch(counts=True)
        seconds_inside = sum(
            seconds for (kind, *_), seconds in meter.seconds().items() if kind in "SR"
        )
        busy = sum(job.group().all_gather(seconds_inside)) / (2 * crossings)
        latencies_seen = [seconds for step in trace.steps() for seconds in latencies(step)]
        median = statistics.median(latencies_seen) if latencies_seen else 0.0
        with_work: float = job.group().broadcast(median, 0)
        return max(with_work - busy, 0.0)

    def layers(self) -> Samples:
        """Measures the layers of this process, and the loss as one more layer. Collective."""
        layers, stages = self._layers, self._layers.owned_stages
        meter = LayerMeter(len(layers.partition.layers), stages.calls_of, stages.layers)
        # Without fast leaves: the meter runs the backward of each layer itself, in other ways.
        schedule = forward_only(layers.placement, 1)
        engine, stage = self._new_engine(schedule, meter.run_of, fast_leaves=False)
        for turn in self._numbers_to_run():
            data = self._micro_batch(turn)
            batch = Batch(data, value_of=stages.value_of)
            _run_batch(engine, stage, batch)
            for output in batch.outputs.values():
                meter.take_loss(0, layers.loss_fn(), output, data.labels[0])
        return meter.samples

    def layers_of_units(self, units: Units) -> Samples:
        """Measures the layers of this process for each unit. Collective.

        Backwards follow the forwards only to free the memory that forwards keep.
        """
        layers, stages = self._layers, self._layers.owned_stages
        count = len(layers.partition.layers)
        meter = LayerMeter(count, stages.calls_of, stages.layers, units)
        schedule = in_turn(layers.placement, 1, "B", units.count)
        engine, stage = self._new_engine(schedule, meter.run_of, fast_leaves=False)
        loss_fn, calls = layers.loss_fn(), itertools.count()

        def loss(output: Nest, label: Nest) -> Tensor:
            """Returns the loss of one unit, and measures the loss function."""
            # The last stage runs one unit after another.
            meter.take_loss(next(calls) % units.count, loss_fn, output, label)
            return loss_fn(output, label)

        for turn in self._numbers_to_run():
            batch = self._new_batch(self._micro_batch(turn), [self._weights[turn]], units, loss)
            _run_batch(engine, stage, batch, units)
        return meter.samples

    def _numbers_to_run(self) -> Iterable[int]:
        """Returns the numbers of the micro-batches to run, repeated until there are enough."""
        count = len(self._weights)
        return (turn % count for turn in range(max(LEAST_SAMPLES, count)))

    def _micro_batch(self, index: int) -> MicroBatches:
        """Returns micro-batch ``index`` of this process, as a batch of one."""
        return MicroBatches(*(values and [values[index]] for values in self._data))

    def _new_batch(
        self,
        data: MicroBatches,
        weights: list[Fraction],
        units: Units = WHOLE,
        loss: Criterion | None = None,
    ) -> Batch:
        """Returns a batch for a stage.

        Args:
            data: The micro-batches.
            weights: Their weights in the loss.
            units: Cuts them into units.
            loss: The loss function; None for the model's.
        """
        loss_fn = self._layers.loss_fn()
        functions = [loss_fn if loss is None else loss]
        weight_of = units.weight_of([loss_fn], data, lambda _, number: weights[number])
        losses = Losses(functions, weights, weight_of=weight_of, units=units.count)
        return Batch(units.cut(data), losses)

    def _new_engine(
        self,
        schedule: Schedule,
        run_of: RunOf | None,
        *observers: Observer,
        fast_leaves: bool = True,
    ) -> tuple[Engine, DygraphStage]:
        """Returns an engine for a schedule, and the stage object that runs its actions.

        Args:
            schedule: The schedule.
            run_of: Returns what runs the layers of a stage; None to run them as in training.
            observers: The observers of the engine.
            fast_leaves: Whether layers may have faster forwards with the same bits.
        """
        job = self._job
        stages = self._layers.owned_stages
        stage = DygraphStage.of(stages, schedule, fast_leaves, run_of)
        plan = schedule.lower(stages.edges(training=True))
        return Engine(plan, stage, job.connect(), job.timeout, observers), stage


def _run_batch(engine: Engine, stage: DygraphStage, batch: Batch, units: Units = WHOLE) -> None:
    """Runs a batch through an engine without reductions and optimizer step; gradients stay."""
    stage.begin(batch, units=units)
    try:
        engine.run({"REDUCE": lambda: None, "STEP": lambda: None})
    finally:
        stage.end()


def computing_together(job: Job) -> Group:
    """Returns the ranks that compute a layer together, each waiting for the slowest."""
    return job.along(*job.degrees.layer_axes)


def clock_for(job: Job) -> Callable[[], float]:
    """Returns a clock, in seconds, to time the actions of stages. Collective over the job.

    If a host has fewer processors than ranks, the clock is the thread's processor time, because
    elapsed time would include waits for a processor.
    """
    ranks = job.everyone().all_gather((host_name(), systems.processors()))
    hosts = Counter(host for host, _ in ranks)
    shared = any(hosts[host] > processors for host, processors in ranks)
    return time.thread_time if shared and device_kind() == "cpu" else device_clock()


def latencies(events: Iterable[Event]) -> list[float]:
    """Returns the seconds of each message: from its send's start to its receive's end."""
    sent: dict[str, float] = {}
    arrived: dict[str, float] = {}
    for event in events:
        if isinstance(event.op, Send):
            sent[event.name[1:]] = event.start
        elif isinstance(event.op, Recv):
            arrived[event.name[1:]] = event.end
    return [arrived[name] - start for name, start in sent.items()]


def crossing_stages(placement: Placement) -> list[int]:
    """Returns the stages that send their values to another rank."""
    rank_of = placement.rank_of
    return [s for s in range(placement.stages - 1) if rank_of(s) != rank_of(s + 1)]
