"""A plan as a value: cut, schedule, recompute, predicted costs, and the bottleneck of its speed.

Start with ``PipelinePlan``. The functions before it write its description, those after it read its
file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fleetpipe.errors import ConfigError, ScheduleError
from fleetpipe.json_value import JsonValue, Source, parse, read
from fleetpipe.partition import LayerInfo, Partition
from fleetpipe.profiling.cost_model import ProcessMemory, StageCost, costs_of
from fleetpipe.profiling.memory import (
    Recompute,
    peak_bytes,
    show_bytes,
    show_seconds,
)
from fleetpipe.profiling.splits import LayerDegrees
from fleetpipe.representation import shows, table
from fleetpipe.schedules import Costs, Schedule, rebuild
from fleetpipe.schedules.forms import draw, panel_of
from fleetpipe.schedules.rows import in_slices

#: A rank that computes for at least this share of the time is the bottleneck.
_BUSY_SHARE = 0.9

#: A rank whose memory is at least this share of the cap makes it a bottleneck.
_FULL_SHARE = 0.95

#: The version of a plan's file, which is written into it.
VERSION = 1

_SOURCE = Source(
    "this is no plan of fleetpipe's",
    ConfigError,
    "write one with plan.write(path), or with fleetpipe plan -o FILE",
)

#: What is read for each stage.
Value = TypeVar("Value")


class Predicted(NamedTuple):
    """The predicted costs of a plan, from the profile on which it is based.

    Attributes:
        time: Seconds of the forwards and backwards of a batch, without the optimizer's step.
        busy: For each rank the seconds that it computes.
        peak_bytes: For each rank the most bytes of its tensors: parameters, gradients, the
            optimizer's state, buffers and activations.
        bound: A lower bound, in seconds, for any plan with these ranks and micro-batches.
        process_bytes: For each rank the most bytes that its process takes: the resident size on a
            CPU, what Paddle reserves on a GPU. None if the profile does not say it.
    """

    time: float
    busy: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    bound: float
    process_bytes: tuple[int, ...] | None = None


def _plan_as_tables(plan: PipelinePlan) -> str:
    """Writes a plan as a heading, a table of the stages and one of the ranks."""
    schedule, predicted = plan.schedule, plan.predicted
    placement = schedule.placement
    heading = (
        f"plan: {schedule.name}, {placement.ranks} ranks, {schedule.micro_batches} micro-batches"
        f"{in_slices(schedule.slices)},"
        f" chunks {placement.chunks} ({placement.name}); {show_seconds(predicted.time)} a batch"
        + (f"; {plan.degrees}" if plan.degrees not in (None, LayerDegrees()) else "")
    )
    rows = [("stage", "rank", "layers", "names", "F ms", "B ms", "holds", "recomputed")]
    for part, cost, again in zip(plan.partition.stages, plan.stages, plan.recompute):
        names = [part.layers[0].name, part.layers[-1].name]
        rows.append(
            (
                str(part.stage),
                str(placement.rank_of(part.stage)),
                show_range(range(part.start, part.end)),
                " .. ".join(names) if part.end - part.start > 1 else names[0],
                f"{1e3 * cost.forward:.3f}",
                f"{1e3 * cost.backward:.3f}",
                show_bytes(cost.held),
                _shown_ranges(again) or "-",
            )
        )
    ranks = [
        ("rank", *map(str, range(placement.ranks))),
        ("computes ms", *(f"{1e3 * busy:.3f}" for busy in predicted.busy)),
        ("waits ms", *(f"{1e3 * (predicted.time - busy):.3f}" for busy in predicted.busy)),
        ("peak memory", *map(show_bytes, predicted.peak_bytes)),
    ]
    if predicted.process_bytes is not None:
        ranks.append(("of the process", *map(show_bytes, predicted.process_bytes)))
    return "\n".join([heading, table(rows, left=(3,)), table(list(zip(*ranks)))])


def _lines_on_time(plan: PipelinePlan) -> Iterator[str]:
    """Yields lines on the time of a batch, the lower bound and the busiest rank."""
    predicted, placement = plan.predicted, plan.schedule.placement
    rank = predicted.busy.index(max(predicted.busy))
    owned = placement.stages_of(rank)
    slowest = max(owned, key=lambda stage: plan.stages[stage].seconds)
    part = plan.partition.stages[slowest]
    share = predicted.busy[rank] / predicted.time if predicted.time else 1.0
    times = predicted.time / predicted.bound if predicted.bound else 1.0
    yield (
        f"time: {show_seconds(predicted.time)} a batch; no plan for {placement.ranks} ranks is"
        f" below {show_seconds(predicted.bound)}: {times:.3f} times that"
    )
    yield (
        f"busiest: rank {rank} computes {share:.1%} of the time; its slowest stage is {slowest}"
        f" (layers {show_range(range(part.start, part.end))})"
    )
    if share >= _BUSY_SHARE:
        yield f"what binds: the work of rank {rank}"
        if part.end - part.start == 1:
            yield f"  layer {part.start} ({part.layers[0].name}) cannot be cut: list it more finely"
    else:
        size = max((cost.output for cost in plan.stages[:-1]), default=0)
        yield (
            "what binds: waiting, while the pipeline fills and drains and values are on their way"
            f" (at most {show_bytes(size)}); more micro-batches make its share smaller"
        )


def _lines_on_memory(plan: PipelinePlan) -> Iterator[str]:
    """Yields lines on the rank that uses the most memory."""
    peaks, taken = plan.predicted.peak_bytes, plan.predicted.process_bytes
    rank = peaks.index(max(peaks))
    most = f"memory: tensors take at most {show_bytes(peaks[rank])}, on rank {rank}"
    if plan.memory_cap is None:
        yield f"{most}; there is no cap"
    else:
        share = peaks[rank] / plan.memory_cap
        yield f"{most}, {share:.1%} of the cap of {show_bytes(plan.memory_cap)}"
        if share >= _FULL_SHARE or any(plan.recompute):
            yield f"  the memory of rank {rank} binds: a plan with a larger cap may be faster"
    if taken is not None:
        about = "" if plan.memory_cap is None else "; the cap is about tensors alone"
        yield f"  its process takes some {show_bytes(taken[rank])}, libraries included{about}"


def _lines_on_recompute(plan: PipelinePlan) -> Iterator[str]:
    """Yields a line for each stage that recomputes layers."""
    for stage, layers in enumerate(plan.recompute):
        if layers:
            rank = plan.schedule.placement.rank_of(stage)
            yield f"recompute: layers {_shown_ranges(layers)} of stage {stage} on rank {rank}"


def show_range(numbers: range) -> str:
    """Writes successive numbers, at least one, as the first and the last: ``3-5``, or ``3``."""
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])


def _shown_ranges(numbers: Sequence[int]) -> str:
    """Writes ascending numbers, successive ones as a range: ``3-5, 8``."""
    ranges: list[range] = []
    for number in numbers:
        if ranges and ranges[-1].stop == number:
            ranges[-1] = range(ranges[-1].start, number + 1)
        else:
            ranges.append(range(number, number + 1))
    return ", ".join(map(show_range, ranges))


@shows("schedule", "memory_cap", "bound", boundaries="partition.boundaries")
@dataclass(frozen=True)
class PipelinePlan:
    """How to run a model on some ranks. Immutable; :meth:`dumps` and :meth:`loads` are inverses.

    ``PipelineLayer(layers, .., plan=plan)`` and ``fleetpipe.pipeline(model, .., split_spec=plan)``
    take it; the strategy's ``pp_degree`` and ``accumulate_steps`` must be its :attr:`ranks` and
    :attr:`micro_batches`. As text it is a table of the stages.

    Attributes:
        schedule: The verified schedule.
        partition: The layers of each stage.
        recompute: For each stage the layers whose forward runs again in backward.
        stages: The costs of each stage for one micro-batch.
        comm: Seconds that a value takes from each stage to the next.
        memory_cap: Bytes that the tensors of a rank may take; None: no cap.
        optimizer_copies: Tensors of the size of a gradient in the optimizer's state.
        bound: A lower bound of the time of any plan, in seconds.
        slices: The costs of each stage for each slice, if the schedule cuts sequences into slices.
        slice_comm: The same as :attr:`comm`, for each slice.
        degrees: The number of ranks over which experts and sequences are split; None if unknown.
        process: The memory that a process takes for its tensors; None if unknown.
    """

    schedule: Schedule
    partition: Partition
    recompute: Recompute
    stages: tuple[StageCost, ...]
    comm: tuple[float, ...]
    memory_cap: float | None
    optimizer_copies: float
    bound: float
    slices: tuple[tuple[StageCost, ...], ...] = ()
    slice_comm: tuple[tuple[float, ...], ...] = ()
    degrees: LayerDegrees | None = None
    process: ProcessMemory | None = None

    @property
    def ranks(self) -> int:
        """Ranks of the pipeline: ``hybrid_configs["pp_degree"]``."""
        return self.schedule.placement.ranks

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a batch: ``pipeline_configs["accumulate_steps"]``."""
        return self.schedule.micro_batches

    @property
    def chunks(self) -> int:
        """Chunks on each rank: ``num_virtual_pipeline_stages``."""
        return self.schedule.placement.chunks

    def schedule_for(self, micro_batches: int) -> Schedule:
        """Returns the plan's schedule for some number of micro-batches, which may be another one.

        Another number gets a verified schedule of the same family, placement and options.

        Raises:
            ScheduleError: It would need more memory than the plan's memory cap.
        """
        if micro_batches == self.micro_batches:
            return self.schedule
        schedule = rebuild(self.schedule, micro_batches)
        schedule.verify()
        peaks = peak_bytes(schedule, self.stages, self.optimizer_copies, self.slices)
        if self.memory_cap is not None and max(peaks) > self.memory_cap:
            raise ScheduleError(
                f"the plan's schedule for {micro_batches} micro-batches passes its memory cap",
                where=f"{schedule.name}, rank {peaks.index(max(peaks))}",
                expected=f"at most {self.memory_cap:.10g} bytes, the cap of the plan",
                got=f"{max(peaks)} bytes at the peak",
                fix=f"plan anew for {micro_batches} micro-batches, or give accumulate_steps="
                f"{self.micro_batches}",
            )
        return schedule

    @property
    def costs(self) -> Costs:
        """The costs of the actions, for ``schedule.simulate``."""

        def costs(stages: Sequence[StageCost], comm: tuple[float, ...], **options: Any) -> Costs:
            return costs_of(stages, comm, bytes=tuple(stage.held for stage in stages), **options)

        each_slice = tuple(map(costs, self.slices, self.slice_comm))
        return costs(self.stages, self.comm, each_slice=each_slice or None)

    @cached_property
    def predicted(self) -> Predicted:
        """The predicted time and memory of the plan."""
        timeline = self.schedule.simulate(self.costs)
        busy = tuple(sum(end - start for _, start, end in row) for row in timeline.events)
        peaks = peak_bytes(self.schedule, self.stages, self.optimizer_copies, self.slices)
        taken = None if self.process is None else tuple(map(self.process.taken, peaks))
        return Predicted(timeline.makespan, busy, peaks, self.bound, taken)

    def explain(self) -> str:
        """Names the bottleneck (work, waiting or memory) and the gap to the lower bound."""
        return "\n".join(
            [*_lines_on_time(self), *_lines_on_memory(self), *_lines_on_recompute(self)]
        )

    def __str__(self) -> str:
        return _plan_as_tables(self)

    def require_layers(self, names: Sequence[str]) -> None:
        """Raises ConfigError for a model that is not the one of the plan's profile.

        Args:
            names: The names of the model's layers, in order.
        """
        planned = [layer.name for layer in self.partition.layers]
        if len(planned) != len(names):
            raise ConfigError(
                "this plan is of another model: the number of layers differs",
                expected=f"{len(planned)} layers, as in the profile",
                got=f"{len(names)} layers",
                fix="profile this model, and plan anew",
            )
        for number, (expected, got) in enumerate(zip(planned, names)):
            if expected != got:
                raise ConfigError(
                    "this plan is of another model: a layer has another name",
                    where=f"layer {number}",
                    expected=f"{expected}, as in the profile",
                    got=got,
                    fix="profile this model, and plan anew",
                )

    def require_degrees(self, degrees: Any) -> None:
        """Raises ConfigError for a job that splits experts or sequences in another way.

        Args:
            degrees: The degrees of the job.
        """
        degrees = LayerDegrees.of(degrees)
        if self.degrees not in (None, degrees):
            raise ConfigError(
                "this plan is for other degrees than the job's",
                expected=str(self.degrees),
                got=str(degrees),
                fix=f"set these degrees, or plan anew with {degrees}",
            )

    def dumps(self) -> str:
        """Returns the plan as JSON."""
        return (
            json.dumps(
                {
                    "fleetpipe-plan": VERSION,
                    "schedule": str(self.schedule),
                    "boundaries": self.partition.boundaries,
                    "recompute": self.recompute,
                    "layers": [layer.name for layer in self.partition.layers],
                    "stages": [stage._asdict() for stage in self.stages],
                    "slices": [[stage._asdict() for stage in part] for part in self.slices],
                    "slice_comm": self.slice_comm,
                    "comm": self.comm,
                    "memory_cap": self.memory_cap,
                    "optimizer_copies": self.optimizer_copies,
                    "bound": self.bound,
                    "degrees": self.degrees and self.degrees._asdict(),
                    "process": self.process and self.process._asdict(),
                }
            )
            + "\n"
        )

    @classmethod
    def loads(cls, text: str) -> PipelinePlan:
        """Reads JSON from :meth:`dumps`, and verifies the schedule in it.

        Raises:
            ConfigError: It is not a plan, or of another version.
            ScheduleError: The schedule was edited and cannot run.
            PartitionError: The cut was edited and is not valid.
        """
        return _read_plan(parse(text, _SOURCE))

    def write(self, path: str | Path) -> None:
        """Writes the plan to a file, as JSON."""
        Path(path).write_text(self.dumps(), encoding="utf-8")

    def plot(self, path: str | Path) -> None:
        """Draws the predicted times of each rank, and below them the activations that it holds.

        Args:
            path: File to write: .png, .svg or .pdf.
        """
        panel = panel_of(self.schedule.simulate(self.costs), "s", "plan", memory=True)
        cap = "" if self.memory_cap is None else f" of {show_bytes(self.memory_cap)}"
        peak = show_bytes(max(self.predicted.peak_bytes))
        draw([replace(panel, title=f"{panel.title} · peak memory {peak}{cap}")], path)

    @classmethod
    def read(cls, path: str | Path) -> PipelinePlan:
        """Reads a file from :meth:`write`; raises the same errors as :meth:`loads`."""
        return read(path, _SOURCE, _read_plan)


def _read_plan(content: JsonValue) -> PipelinePlan:
    """Reads the JSON object of a plan's file; raises the errors of :meth:`PipelinePlan.loads`."""
    version = content["fleetpipe-plan"]
    if version.content != VERSION:
        raise version.refused(str(VERSION))
    schedule = Schedule.parse(content["schedule"].text())
    schedule.verify()
    names = tuple(LayerInfo(name) for name in content["layers"].texts())
    partition = Partition(content["boundaries"].counts(), "plan", names)
    if len(partition.stages) != schedule.placement.stages:
        raise ScheduleError(
            "the schedule of this plan is for another number of stages than its cut",
            expected=f"{len(partition.stages)} stages",
            got=f"{schedule.placement.stages} stages",
            fix="make the plan anew with fleetpipe plan",
        )
    cap, degrees, process = map(content.get, ("memory_cap", "degrees", "process"))

    def costs_of_stages(value: JsonValue) -> tuple[StageCost, ...]:
        return _read_for_each_stage(
            partition, value, lambda stage: stage.record(StageCost, JsonValue.figure)
        )

    def comm_of_stages(value: JsonValue) -> tuple[float, ...]:
        return _read_for_each_stage(partition, value, JsonValue.figure)

    slices, slice_comm = (
        [] if entry is None else entry.items()
        for entry in map(content.get, ("slices", "slice_comm"))
    )
    count = schedule.slices if schedule.slices > 1 else 0
    if not len(slices) == len(slice_comm) == count:
        raise content.refused(f"`slices` and `slice_comm` for the {count} slices of its schedule")
    return PipelinePlan(
        schedule,
        partition,
        _read_for_each_stage(partition, content["recompute"], JsonValue.counts),
        costs_of_stages(content["stages"]),
        comm_of_stages(content["comm"]),
        None if cap is None else cap.figure(),
        content["optimizer_copies"].figure(),
        content["bound"].figure(),
        tuple(map(costs_of_stages, slices)),
        tuple(map(comm_of_stages, slice_comm)),
        None if degrees is None else degrees.record(LayerDegrees, JsonValue.count),
        None if process is None else process.record(ProcessMemory, JsonValue.figure),
    )


def _read_for_each_stage(
    partition: Partition, value: JsonValue, each: Callable[[JsonValue], Value]
) -> tuple[Value, ...]:
    """Reads a JSON list with one item for each stage of a cut; ``each`` reads one item."""
    values = tuple(map(each, value.items()))
    if len(values) != len(partition.stages):
        raise value.refused(f"a list of {len(partition.stages)} values, one for each stage")
    return values
