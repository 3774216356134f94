"""Describes a plan: a table of its stages and ranks, and what keeps it from being faster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fleetpipe.partition import Partition
from fleetpipe.profiling.cost_model import StageCost
from fleetpipe.profiling.recomputing import Recompute
from fleetpipe.profiling.sizes import show_bytes, show_seconds
from fleetpipe.profiling.splits.degrees import LayerDegrees
from fleetpipe.representation import table
from fleetpipe.schedules import Schedule
from fleetpipe.schedules.rows import in_slices

#: A rank that computes this share of the time hardly waits: what it computes binds.
_BUSY = 0.9

#: A rank that uses this share of the cap has no room to do otherwise.
_FULL = 0.95


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


class Facts(NamedTuple):
    """The facts about a plan from which its description is written."""

    schedule: Schedule
    partition: Partition
    recompute: Recompute
    stages: Sequence[StageCost]
    predicted: Predicted
    memory_cap: float | None
    degrees: LayerDegrees | None = None


def describe(facts: Facts) -> str:
    """Returns a heading, a table of the stages and one of the ranks."""
    schedule, predicted = facts.schedule, facts.predicted
    placement = schedule.placement
    heading = (
        f"plan: {schedule.name}, {placement.ranks} ranks, {schedule.micro_batches} micro-batches"
        f"{in_slices(schedule.slices)},"
        f" chunks {placement.chunks} ({placement.name}); {show_seconds(predicted.time)} a batch"
        + (f"; {facts.degrees}" if facts.degrees not in (None, LayerDegrees()) else "")
    )
    rows = [("stage", "rank", "layers", "names", "F ms", "B ms", "holds", "recomputed")]
    for part, cost, again in zip(facts.partition.stages, facts.stages, facts.recompute):
        names = [part.layers[0].name, part.layers[-1].name]
        rows.append(
            (
                str(part.stage),
                str(placement.rank_of(part.stage)),
                shown_range(range(part.start, part.end)),
                " .. ".join(names) if part.end - part.start > 1 else names[0],
                f"{1e3 * cost.forward:.3f}",
                f"{1e3 * cost.backward:.3f}",
                show_bytes(cost.held),
                _ranges(again) or "-",
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


def name_bottleneck(facts: Facts) -> str:
    """Names the bottleneck (a rank's work, waiting or memory) and the gap to the lower bound."""
    return "\n".join([*_time(facts), *_memory(facts), *_recompute(facts)])


def _time(facts: Facts) -> Iterator[str]:
    predicted, placement = facts.predicted, facts.schedule.placement
    rank = predicted.busy.index(max(predicted.busy))
    owned = placement.stages_of(rank)
    slowest = max(owned, key=lambda stage: facts.stages[stage].seconds)
    part = facts.partition.stages[slowest]
    share = predicted.busy[rank] / predicted.time if predicted.time else 1.0
    times = predicted.time / predicted.bound if predicted.bound else 1.0
    yield (
        f"time: {show_seconds(predicted.time)} a batch; no plan for {placement.ranks} ranks is"
        f" below {show_seconds(predicted.bound)}: {times:.3f} times that"
    )
    yield (
        f"busiest: rank {rank} computes {share:.1%} of the time; its slowest stage is {slowest}"
        f" (layers {shown_range(range(part.start, part.end))})"
    )
    if share >= _BUSY:
        yield f"what binds: the work of rank {rank}"
        if part.end - part.start == 1:
            yield f"  layer {part.start} ({part.layers[0].name}) cannot be cut: list it more finely"
    else:
        latency = max((cost.output for cost in facts.stages[:-1]), default=0)
        yield (
            "what binds: waiting, while the pipeline fills and drains and values are on their way"
            f" (at most {show_bytes(latency)}); more micro-batches make its share smaller"
        )


def _memory(facts: Facts) -> Iterator[str]:
    peaks, taken = facts.predicted.peak_bytes, facts.predicted.process_bytes
    rank = peaks.index(max(peaks))
    most = f"memory: tensors take at most {show_bytes(peaks[rank])}, on rank {rank}"
    if facts.memory_cap is None:
        yield f"{most}; there is no cap"
    else:
        share = peaks[rank] / facts.memory_cap
        yield f"{most}, {share:.1%} of the cap of {show_bytes(facts.memory_cap)}"
        if share >= _FULL or any(facts.recompute):
            yield f"  the memory of rank {rank} binds: a plan with a larger cap may be faster"
    if taken is not None:
        about = "" if facts.memory_cap is None else "; the cap is about tensors alone"
        yield f"  its process takes some {show_bytes(taken[rank])}, libraries included{about}"


def _recompute(facts: Facts) -> Iterator[str]:
    for stage, layers in enumerate(facts.recompute):
        if layers:
            rank = facts.schedule.placement.rank_of(stage)
            yield f"recompute: layers {_ranges(layers)} of stage {stage} on rank {rank}"


def shown_range(numbers: range) -> str:
    """Writes the first and the last of successive numbers: ``3-5``, or ``3``."""
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])


def _ranges(numbers: Sequence[int]) -> str:
    """Writes ascending numbers, successive ones as a range: ``3-5, 8``."""
    ranges: list[range] = []
    for number in numbers:
        if ranges and ranges[-1].stop == number:
            ranges[-1] = range(ranges[-1].start, number + 1)
        else:
            ranges.append(range(number, number + 1))
    return ", ".join(map(shown_range, ranges))
