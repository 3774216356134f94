"""Estimates the time and memory of a training step on any cluster, without running anything.

Begin with ``TrainingJob``: a job under a layout. The time of a pipeline comes from the simulator of
schedules; since a schedule repeats after some micro-batches, a long batch is extrapolated from two
shorter ones. ``cluster.py`` describes the machines, ``workload.py`` the model; ``layout_search.py``
tries all layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from fleetpipe.contrib.clusters.cluster import Cluster, JobLayout
from fleetpipe.contrib.clusters.workload import Transformer, Workload
from fleetpipe.errors import ConfigError
from fleetpipe.partition import fastest
from fleetpipe.profiling.cost_model import LayerCost, StageCost, Stages, costs_of
from fleetpipe.schedules import Schedule, build
from fleetpipe.schedules.action import flatten
from fleetpipe.schedules.simulation import replay

__all__ = ["Cluster", "StepEstimate", "TrainingJob", "JobLayout", "Memory", "Transformer"]

#: A batch of more actions is extrapolated, not simulated.
_MOST_PLAYED = 20_000

#: By stage the forwards that a rank holds: those before their B or I, and those before their W.
HeldStages = tuple[dict[int, int], dict[int, int]]

#: The matrices of a layer, which are gathered one by one.
_MATRICES = 4


@lru_cache(maxsize=1024)
def stages_of(layers: tuple[LayerCost, ...], stages: int) -> tuple[StageCost, ...] | None:
    """Returns the costs of the stages of the fastest cut; None if there are too few layers."""
    blocks = layers[1:-1]
    costs = Stages(layers, None)
    if stages == 1:
        return costs.cut((0, len(layers)))
    if len(blocks) < max(stages - 2, 1):
        return None
    if all(block is blocks[0] for block in blocks):  # a transformer's: there is nothing to search
        return costs.cut(_even(layers, stages))
    totals = [0.0, *accumulate(layer.seconds for layer in layers)]

    def seconds(start: int, end: int) -> float:
        return totals[end] - totals[start]

    places, count = range(1, len(layers)), len(layers)
    cut = fastest(places, count, stages, lambda _, *part: seconds(*part), seconds)
    return costs.cut(cut.boundaries)


def _even(layers: tuple[LayerCost, ...], stages: int) -> tuple[int, ...]:
    """Returns a cut with equally many blocks in each inner stage, and the rest at both ends."""
    first, block, last = (layers[index].seconds for index in (0, 1, -1))
    blocks, inner = len(layers) - 2, stages - 2
    sizes = range(blocks // stages, blocks // stages + 3)
    ends = [blocks, blocks]
    for limit in sorted(size * block + extra for size in sizes for extra in (0.0, first, last)):
        ends = [max(0, int((limit - extra) / block + 1e-9)) for extra in (first, last)]
        if sum(ends) + inner * int(limit / block + 1e-9) >= blocks:
            break
    ends[0] = min(ends[0], -(-blocks // stages)) if inner else blocks - min(ends[1], blocks)
    ends[1] = min(ends[1], blocks - ends[0])
    while blocks - sum(ends) < inner:
        ends[ends.index(max(ends))] -= 1
    size, more = divmod(blocks - sum(ends), inner) if inner else (0, 0)
    counts = [ends[0] + 1, *(size + (index < more) for index in range(inner)), ends[1] + 1]
    return (0, *accumulate(counts))


@lru_cache(maxsize=256)
def cached_schedule(name: str, ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """Builds a schedule and caches it, as layouts with many degrees share it.

    Raises:
        ConfigError: The schedule does not take these sizes.
    """
    return build(name, ranks=ranks, micro_batches=micro_batches, chunks=chunks)


def small(name: str, chunks: int) -> Schedule:
    """Returns a schedule on two ranks, from which its properties on more ranks are read.

    Raises:
        ConfigError: The schedule does not take so many chunks.
    """
    return cached_schedule(name, 2, 4, chunks)


def pipeline_time(
    name: str, ranks: int, chunks: int, micro_batches: int, stages: Sequence[StageCost], comm: float
) -> tuple[float, float]:
    """Returns the time of a batch, and the computing time of the busiest rank.

    Args:
        name: The schedule's name.
        ranks: Ranks of the pipeline.
        chunks: Chunks on each rank.
        micro_batches: Micro-batches of a batch.
        stages: The costs of the stages, with the transfers that keep ranks busy.
        comm: Seconds of latency of a value between stages.

    Raises:
        ConfigError: The schedule does not take these numbers.
    """
    actions = 2 * len(stages) * micro_batches
    period = _period(ranks, micro_batches)
    first = 2 * period + micro_batches % period
    if actions <= _MOST_PLAYED or micro_batches <= first + period:
        return _play(name, ranks, chunks, micro_batches, stages, comm)
    shorter = _play(name, ranks, chunks, first, stages, comm)
    longer = _play(name, ranks, chunks, first + period, stages, comm)
    rounds = (micro_batches - first) / period
    seconds, busy = (low + rounds * (high - low) for low, high in zip(shorter, longer))
    return seconds, busy


def _period(ranks: int, micro_batches: int) -> int:
    """Returns after how many micro-batches a schedule repeats: p for interleaved ones."""
    return max(ranks, 4) if micro_batches >= ranks else micro_batches


def _play(
    name: str, ranks: int, chunks: int, micro_batches: int, stages: Sequence[StageCost], comm: float
) -> tuple[float, float]:
    schedule = cached_schedule(name, ranks, micro_batches, chunks)
    times = replay(schedule, None, costs_of(stages, comm))
    return max(ends[-1] for ends in times.ends), max(times.busy)


@lru_cache(maxsize=256)
def most_held(
    name: str, ranks: int, chunks: int, micro_batches: int
) -> tuple[HeldStages, ...] | None:
    """Returns for each rank the most activations that it holds, if all stages are alike.

    None if the schedule does not take these numbers. As the amount does not grow once the pipeline
    is full, at most two periods are simulated.
    """
    enough = min(micro_batches, 2 * _period(ranks, micro_batches))
    try:
        held = _most_of_ranks(cached_schedule(name, ranks, enough, chunks))
        if any(enough in forwards.values() for forwards, _ in held):
            # A stage that holds all micro-batches may hold more of a longer batch.
            held = _most_of_ranks(cached_schedule(name, ranks, micro_batches, chunks))
    except ConfigError:
        return None
    return held


def _most_of_ranks(schedule: Schedule) -> tuple[HeldStages, ...]:
    return tuple(_most_of(schedule, rank) for rank in range(len(schedule.actions)))


def _most_of(schedule: Schedule, rank: int) -> HeldStages:
    whole = dict.fromkeys(schedule.placement.stages_of(rank), 0)
    waiting = dict(whole)
    most, best = -1, (whole, waiting)
    for kind, stage, _ in flatten(schedule.actions[rank]):
        whole[stage] += kind == "F"
        total = sum(whole.values()) + sum(waiting.values())
        if total > most:
            most = total
            best = {**whole}, {**waiting}
        whole[stage] -= kind in "BI"
        waiting[stage] += (kind == "I") - (kind == "W")
    return best


class Memory(NamedTuple):
    """The bytes that a rank uses.

    Attributes:
        parameters: Bytes of its parameters.
        gradients: Bytes of the gradients.
        optimizer: Bytes of the optimizer's state.
        activations: The most bytes that forwards hold until their backward.
        working: Additional bytes that an action uses while it runs.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    working: float

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return sum(self)


class StepEstimate(NamedTuple):
    """The time and memory of a step under a layout.

    Attributes:
        layout: The layout.
        micro_batches: Micro-batches of a replica.
        seconds: Time of a step.
        utilisation: FLOPs of the model, without recompute, over the peak of all devices (MFU); 0 if
            the model's FLOPs are unknown.
        computing: Seconds that the busiest rank computes, its exchanges included.
        bubble: Seconds for which the busiest rank waits.
        exchange: Seconds of the exchange of gradients that nothing hides.
        update: Seconds of the optimizer's step.
        memory: The memory of each rank of a pipeline.
    """

    layout: JobLayout
    micro_batches: int
    seconds: float
    utilisation: float
    computing: float
    bubble: float
    exchange: float
    update: float
    memory: tuple[Memory, ...]

    @property
    def peak(self) -> float:
        """The most bytes of any rank."""
        return max(rank.total for rank in self.memory)


@dataclass(frozen=True)
class TrainingJob:
    """A model to train, the cluster to train it on, and the batch.

    Attributes:
        model: The model to train.
        cluster: The cluster to train it on.
        batch: Sequences of a step, of all replicas together.
        optimizer_copies: Tensors of a gradient's size in the optimizer's state.
    """

    model: Workload
    cluster: Cluster
    batch: int
    optimizer_copies: float = 3

    def costs(self, layout: JobLayout) -> tuple[LayerCost, ...]:
        """Returns each layer's costs on a rank; those of equal layers are one object.

        With sharding stage 3 they include the gathering of the layer's parameters.
        """
        layers = self.model.costs(layout, self.cluster)
        if layout.sharding_stage < 3 or layout.sharding == 1:
            return layers
        gathered = {id(layer): self._with_gathers(layer, layout) for layer in layers}
        return tuple(gathered[id(layer)] for layer in layers)

    def stages(self, layout: JobLayout) -> tuple[StageCost, ...] | None:
        """Returns the costs of a layout's stages, with everything that keeps a rank busy."""
        if not layout.micro_batches(self.batch) or not self.model.fits(layout):
            return None
        stages = stages_of(self.costs(layout), layout.pipeline * layout.chunks)
        return stages and tuple(self._sending(stage, layout) for stage in stages)

    def estimate(self, layout: JobLayout) -> StepEstimate | None:
        """Estimates a step under a layout; None if the layout is impossible, see :meth:`memory`."""
        stages, memory, cluster = self.stages(layout), self.memory(layout), self.cluster
        if stages is None or memory is None:
            return None
        micro_batches = layout.micro_batches(self.batch)
        hidden = cluster.overlapped_transfers if layout.pipeline > 1 else 0.0
        span, busy = pipeline_time(
            *(layout.schedule, layout.pipeline, layout.chunks, micro_batches),
            stages,
            hidden * self._transfer(layout, stages[0].output),
        )
        exchange, update = self._optimizing(layout, stages)
        seconds = span + exchange + update
        flops = 3 * self.batch * self.model.forward_flops()
        utilisation = flops / (seconds * layout.ranks * cluster.peak) if seconds else 0.0
        parts = (busy, span - busy, exchange, update)
        return StepEstimate(layout, micro_batches, seconds, utilisation, *parts, memory)

    def _transfer(self, layout: JobLayout, size: float) -> float:
        """Returns how long values between stages take; each tensor rank sends its part."""
        parts = 1 if layout.sequence_parallel else layout.tensor
        return self.cluster.link(layout.neighbour).seconds(size / parts)

    def _with_gathers(self, layer: LayerCost, layout: JobLayout) -> LayerCost:
        """Adds to a layer's costs the gathers of its parameters and the scatter of gradients.

        The share that may be overlapped is hidden as long as the layer computes.
        """
        once = self.cluster.gather(layer.parameters, layout.shards, _MATRICES)
        hides = self.cluster.overlapped_gradients
        forward = max(once - hides * layer.forward, 0.0)
        backward = max(2 * once - hides * layer.whole, 0.0)
        return replace(
            layer,
            forward=layer.forward + forward,
            backward=layer.whole + backward,
            input_grad=None if layer.input_grad is None else layer.input_grad + backward,
        )

    def _sending(self, stage: StageCost, layout: JobLayout) -> StageCost:
        """Adds to a stage's costs the part of its transfers that nothing hides."""
        shown = 1 - self.cluster.overlapped_transfers
        if layout.pipeline == 1 or not shown:
            return stage
        forward = shown * self._transfer(layout, stage.output)
        return stage._replace(
            forward=stage.forward + forward,
            backward=stage.backward + forward,
            input_grad=stage.input_grad + forward,
        )

    def _optimizing(self, layout: JobLayout, stages: Sequence[StageCost]) -> tuple[float, float]:
        """Returns the seconds of the visible exchange of gradients, and of the update.

        An update reads and writes all of the optimizer's state.
        """
        cluster, sharding = self.cluster, layout.sharding
        # The placement does not depend on the number of micro-batches.
        ranks = layout.pipeline
        placed = cached_schedule(layout.schedule, ranks, 2 * ranks, layout.chunks).placement
        owned = [placed.stages_of(rank) for rank in range(ranks)]
        gradients = max(sum(stages[stage].gradients for stage in rank) for rank in owned)
        parameters = max(sum(stages[stage].parameters for stage in rank) for rank in owned)
        seconds = cluster.reduce(gradients / sharding, layout.copies)
        if layout.sharding_stage < 3:
            seconds += cluster.gather(gradients, layout.shards)
            seconds += cluster.gather(parameters, layout.shards)
        traffic = parameters + gradients * (1 + 2 * self.optimizer_copies)
        return (1 - cluster.overlapped_gradients) * seconds, cluster.traffic(traffic / sharding)

    def memory(self, layout: JobLayout) -> tuple[Memory, ...] | None:
        """Returns the memory of each rank of a pipeline; None if the layout is impossible.

        That is if the model cannot be split so or has too few layers, or the schedule does not take
        the numbers.
        """
        micro_batches = layout.micro_batches(self.batch)
        stages = self.stages(layout)
        held = most_held(layout.schedule, layout.pipeline, layout.chunks, micro_batches)
        if stages is None or held is None:
            return None
        splits = small(layout.schedule, layout.chunks).splits_backward
        over = [layout.sharding if layout.sharding_stage >= least else 1 for least in (3, 2, 1)]
        rows = []
        for forwards, waiting in held:
            owned = [stages[stage] for stage in forwards]
            gradients = sum(stage.gradients for stage in owned)
            kept = [stage.held_split if splits else stage.held for stage in owned]
            activations = sum(number * size for number, size in zip(forwards.values(), kept))
            activations += sum(number * stages[one].waiting for one, number in waiting.items())
            rows.append(
                Memory(
                    sum(stage.parameters for stage in owned) / over[0],
                    gradients / over[1],
                    self.optimizer_copies * gradients / over[2],
                    activations,
                    max(stage.working for stage in owned),
                )
            )
        return tuple(rows)

    def least(self, layout: JobLayout) -> tuple[float, float] | None:
        """Returns rough lower bounds of a layout's seconds and bytes, quickly.

        None if the model cannot be split so. It assumes stages as even as possible, and the bubble
        of 1F1B.
        """
        micro_batches = layout.micro_batches(self.batch)
        if not micro_batches or not self.model.fits(layout):
            return None
        layers = self.model.costs(layout, self.cluster)
        if len(layers) < layout.pipeline * layout.chunks:
            return None
        total = sum(layer.seconds for layer in layers) / layout.pipeline
        slowest = max(total, *(layer.seconds for layer in layers))
        schedule, waiting = small(layout.schedule, layout.chunks), 0.0
        if schedule.placement.shape == "loop" and not schedule.splits_backward:
            waiting = (layout.pipeline - 1) * total / (layout.chunks * schedule.slices)
        parameters = sum(layer.parameters for layer in layers) / layout.pipeline
        gradients = sum(layer.gradients for layer in layers) / layout.pipeline
        kept = parameters + gradients if layout.sharding_stage == 1 else 0.0
        kept += self.optimizer_copies * gradients / layout.sharding
        return micro_batches * slowest + waiting, kept
