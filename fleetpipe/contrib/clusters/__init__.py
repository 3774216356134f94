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

#: The time of a batch with more actions is extrapolated from those of shorter batches.
_MOST_SIMULATED_ACTIONS = 20_000

#: The micro-batches in flight in each stage of one rank: first those whose B or I has yet to run,
#: then those of which only W has yet to run. Both dicts are by stage.
ForwardsInFlight = tuple[dict[int, int], dict[int, int]]

#: The weight matrices of a layer, of which sharding stage 3 gathers each by a message of its own.
_MATRICES_OF_A_LAYER = 4


@lru_cache(maxsize=1024)
def stages_of(layers: tuple[LayerCost, ...], stages: int) -> tuple[StageCost, ...] | None:
    """Cuts layers into stages so that the slowest stage is as fast as possible.

    Returns:
        The costs of each stage, in order; None if there are too few layers.
    """
    blocks = layers[1:-1]
    costs = Stages(layers, None)
    if stages == 1:
        return costs.cut((0, len(layers)))
    if len(blocks) < max(stages - 2, 1):
        return None
    if all(block is blocks[0] for block in blocks):  # a transformer's: there is nothing to search
        return costs.cut(_even_boundaries(layers, stages))
    totals = [0.0, *accumulate(layer.seconds for layer in layers)]

    def seconds(start: int, end: int) -> float:
        return totals[end] - totals[start]

    positions, count = range(1, len(layers)), len(layers)
    cut = fastest(positions, count, stages, lambda _, *part: seconds(*part), seconds)
    return costs.cut(cut.boundaries)


def _even_boundaries(layers: tuple[LayerCost, ...], stages: int) -> tuple[int, ...]:
    """Cuts a transformer: equally many blocks in each inner stage, the rest in both end stages.

    The first stage also has the embedding and the last one the head, and therefore fewer blocks.

    Args:
        layers: The embedding, the blocks, which all cost the same, and the head.
        stages: The number of stages, at least 2.

    Returns:
        The first layer of each stage, and the number of layers.
    """
    first, block, last = (layers[index].seconds for index in (0, 1, -1))
    blocks, inner = len(layers) - 2, stages - 2
    sizes = range(blocks // stages, blocks // stages + 3)
    ends = [blocks, blocks]  # the number of blocks in the first stage and in the last one
    # The least time of the slowest stage within which all blocks have room.
    for limit in sorted(size * block + extra for size in sizes for extra in (0.0, first, last)):
        ends = [max(0, int((limit - extra) / block + 1e-9)) for extra in (first, last)]
        if sum(ends) + inner * int(limit / block + 1e-9) >= blocks:
            break
    # Give back what is too much, so that each inner stage has a block at least.
    ends[0] = min(ends[0], -(-blocks // stages)) if inner else blocks - min(ends[1], blocks)
    ends[1] = min(ends[1], blocks - ends[0])
    while blocks - sum(ends) < inner:
        ends[ends.index(max(ends))] -= 1
    size, more = divmod(blocks - sum(ends), inner) if inner else (0, 0)
    counts = [ends[0] + 1, *(size + (index < more) for index in range(inner)), ends[1] + 1]
    return (0, *accumulate(counts))


@lru_cache(maxsize=256)
def cached_schedule(name: str, ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """Builds a schedule, or returns one that was built before: many layouts share a schedule.

    Raises:
        ConfigError: The schedule does not take these sizes.
    """
    return build(name, ranks=ranks, micro_batches=micro_batches, chunks=chunks)


def schedule_on_two_ranks(name: str, chunks: int) -> Schedule:
    """Builds a schedule on two ranks, to look up what does not depend on the number of ranks.

    Raises:
        ConfigError: The schedule does not take so many chunks.
    """
    return cached_schedule(name, 2, 4, chunks)


def pipeline_time(
    name: str, ranks: int, chunks: int, micro_batches: int, stages: Sequence[StageCost], comm: float
) -> tuple[float, float]:
    """Returns the seconds of a batch, and how many of these the busiest rank computes.

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
    period = _repeat_period(ranks, micro_batches)
    first = 2 * period + micro_batches % period
    if actions <= _MOST_SIMULATED_ACTIONS or micro_batches <= first + period:
        return _simulate(name, ranks, chunks, micro_batches, stages, comm)
    shorter = _simulate(name, ranks, chunks, first, stages, comm)
    longer = _simulate(name, ranks, chunks, first + period, stages, comm)
    rounds = (micro_batches - first) / period
    seconds, busy = (low + rounds * (high - low) for low, high in zip(shorter, longer))
    return seconds, busy


def _repeat_period(ranks: int, micro_batches: int) -> int:
    """Returns after how many micro-batches the order of actions in a schedule repeats itself."""
    return max(ranks, 4) if micro_batches >= ranks else micro_batches


def _simulate(
    name: str, ranks: int, chunks: int, micro_batches: int, stages: Sequence[StageCost], comm: float
) -> tuple[float, float]:
    """Returns the result of :func:`pipeline_time`, by a simulation of the whole batch."""
    schedule = cached_schedule(name, ranks, micro_batches, chunks)
    times = replay(schedule, None, costs_of(stages, comm))
    return max(ends[-1] for ends in times.ends), max(times.busy)


@lru_cache(maxsize=256)
def peak_forwards(
    name: str, ranks: int, chunks: int, micro_batches: int
) -> tuple[ForwardsInFlight, ...] | None:
    """Returns the forwards in flight of each rank when it has the most of them.

    All stages count alike. Once the pipeline is full the number does not grow any more, so that at
    most two periods of the schedule are simulated.

    Returns:
        A value for each rank; None if the schedule does not take these numbers.
    """
    enough = min(micro_batches, 2 * _repeat_period(ranks, micro_batches))
    try:
        peaks = _peak_forwards_of_ranks(cached_schedule(name, ranks, enough, chunks))
        if any(enough in forwards.values() for forwards, _ in peaks):
            # A stage with all micro-batches in flight may have more of a longer batch.
            peaks = _peak_forwards_of_ranks(cached_schedule(name, ranks, micro_batches, chunks))
    except ConfigError:
        return None
    return peaks


def _peak_forwards_of_ranks(schedule: Schedule) -> tuple[ForwardsInFlight, ...]:
    return tuple(_peak_forwards_of_rank(schedule, rank) for rank in range(len(schedule.actions)))


def _peak_forwards_of_rank(schedule: Schedule, rank: int) -> ForwardsInFlight:
    """Returns the forwards in flight of a rank at the first time that it has the most of them."""
    before_backward = dict.fromkeys(schedule.placement.stages_of(rank), 0)
    before_weight_grad = dict(before_backward)
    most, peak = -1, (before_backward, before_weight_grad)
    for kind, stage, _ in flatten(schedule.actions[rank]):
        before_backward[stage] += kind == "F"
        total = sum(before_backward.values()) + sum(before_weight_grad.values())
        if total > most:
            most = total
            peak = {**before_backward}, {**before_weight_grad}
        before_backward[stage] -= kind in "BI"
        before_weight_grad[stage] += (kind == "I") - (kind == "W")
    return peak


class Memory(NamedTuple):
    """The bytes that a rank uses.

    Attributes:
        parameters: Bytes of the rank's parameters.
        gradients: Bytes of the gradients.
        optimizer: Bytes of the optimizer's state.
        activations: The most bytes that forwards save for their backwards at one time.
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
        """Returns the costs of each layer for one micro-batch on one rank of a layout.

        Equal layers have the same object. With sharding stage 3 the costs include the gathering of
        the layer's parameters.
        """
        layers = self.model.costs(layout, self.cluster)
        if layout.sharding_stage < 3 or layout.sharding == 1:
            return layers
        with_gathers = {id(layer): self._with_gathers(layer, layout) for layer in layers}
        return tuple(with_gathers[id(layer)] for layer in layers)

    def stages(self, layout: JobLayout) -> tuple[StageCost, ...] | None:
        """Returns each stage's costs under a layout, with transfers that computing does not hide.

        Returns None if the batch or the model cannot be split so.
        """
        if not layout.micro_batches(self.batch) or not self.model.fits(layout):
            return None
        stages = stages_of(self.costs(layout), layout.pipeline * layout.chunks)
        return stages and tuple(self._with_transfers(stage, layout) for stage in stages)

    def estimate(self, layout: JobLayout) -> StepEstimate | None:
        """Returns the estimate of a step under a layout; None if the layout is impossible."""
        stages, memory, cluster = self.stages(layout), self.memory(layout), self.cluster
        if stages is None or memory is None:
            return None
        micro_batches = layout.micro_batches(self.batch)
        hidden = cluster.overlapped_transfers if layout.pipeline > 1 else 0.0
        span, busy = pipeline_time(
            *(layout.schedule, layout.pipeline, layout.chunks, micro_batches),
            stages,
            hidden * self._transfer_seconds(layout, stages[0].output),
        )
        exchange, update = self._seconds_after_backwards(layout, stages)
        seconds = span + exchange + update
        flops = 3 * self.batch * self.model.forward_flops()
        utilisation = flops / (seconds * layout.ranks * cluster.peak) if seconds else 0.0
        parts = (busy, span - busy, exchange, update)
        return StepEstimate(layout, micro_batches, seconds, utilisation, *parts, memory)

    def _transfer_seconds(self, layout: JobLayout, size: float) -> float:
        """Returns the seconds of a transfer of ``size`` bytes between two stages.

        Without sequence parallelism each rank of ``tensor`` has the same value and sends a part.
        """
        parts = 1 if layout.sequence_parallel else layout.tensor
        return self.cluster.link(layout.neighbour).seconds(size / parts)

    def _with_gathers(self, layer: LayerCost, layout: JobLayout) -> LayerCost:
        """Adds to a layer's costs the gathers of its parameters and the scatter of gradients.

        The layer's computing hides a part of their time: the fraction
        ``cluster.overlapped_gradients``. The backward gathers the parameters once more, and
        scatters the gradients.
        """
        once = self.cluster.gather(layer.parameters, layout.shards, _MATRICES_OF_A_LAYER)
        overlap = self.cluster.overlapped_gradients
        forward = max(once - overlap * layer.forward, 0.0)
        backward = max(2 * once - overlap * layer.whole, 0.0)
        return replace(
            layer,
            forward=layer.forward + forward,
            backward=layer.whole + backward,
            input_grad=None if layer.input_grad is None else layer.input_grad + backward,
        )

    def _with_transfers(self, stage: StageCost, layout: JobLayout) -> StageCost:
        """Adds to a stage's costs the part of its transfers that computing does not hide."""
        not_hidden = 1 - self.cluster.overlapped_transfers
        if layout.pipeline == 1 or not not_hidden:
            return stage
        transfer = not_hidden * self._transfer_seconds(layout, stage.output)
        return stage._replace(
            forward=stage.forward + transfer,
            backward=stage.backward + transfer,
            input_grad=stage.input_grad + transfer,
        )

    def _seconds_after_backwards(
        self, layout: JobLayout, stages: Sequence[StageCost]
    ) -> tuple[float, float]:
        """Returns the seconds after the last backward of a step, on the rank with the most of them.

        These are the exchange of gradients, as far as backwards do not hide it, and the optimizer's
        update, which reads and writes all of the optimizer's state.
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

        A layout is impossible if the model cannot be split so or has too few layers, or if the
        schedule does not take its numbers of ranks, chunks and micro-batches.
        """
        micro_batches = layout.micro_batches(self.batch)
        stages = self.stages(layout)
        peaks = peak_forwards(layout.schedule, layout.pipeline, layout.chunks, micro_batches)
        if stages is None or peaks is None:
            return None
        splits = schedule_on_two_ranks(layout.schedule, layout.chunks).splits_backward
        # By how many ranks sharding divides parameters, gradients and the optimizer's state.
        by_parameters, by_gradients, by_state = (
            layout.sharding if layout.sharding_stage >= stage else 1 for stage in (3, 2, 1)
        )
        of_ranks = []
        for before_backward, before_weight_grad in peaks:
            owned = [stages[stage] for stage in before_backward]
            gradients = sum(stage.gradients for stage in owned)
            saved = [stage.held_split if splits else stage.held for stage in owned]
            activations = sum(n * size for n, size in zip(before_backward.values(), saved))
            activations += sum(n * stages[s].waiting for s, n in before_weight_grad.items())
            of_ranks.append(
                Memory(
                    sum(stage.parameters for stage in owned) / by_parameters,
                    gradients / by_gradients,
                    self.optimizer_copies * gradients / by_state,
                    activations,
                    max(stage.working for stage in owned),
                )
            )
        return tuple(of_ranks)

    def least(self, layout: JobLayout) -> tuple[float, float] | None:
        """Returns lower bounds of the seconds of a step and of the most bytes of a rank, quickly.

        The bounds assume stages as even as possible, and the bubble of 1F1B. The result is None if
        the model cannot be split so.
        """
        micro_batches = layout.micro_batches(self.batch)
        if not micro_batches or not self.model.fits(layout):
            return None
        layers = self.model.costs(layout, self.cluster)
        if len(layers) < layout.pipeline * layout.chunks:
            return None
        total = sum(layer.seconds for layer in layers) / layout.pipeline
        slowest = max(total, *(layer.seconds for layer in layers))
        schedule, waiting = schedule_on_two_ranks(layout.schedule, layout.chunks), 0.0
        if schedule.placement.shape == "loop" and not schedule.splits_backward:
            waiting = (layout.pipeline - 1) * total / (layout.chunks * schedule.slices)
        parameters = sum(layer.parameters for layer in layers) / layout.pipeline
        gradients = sum(layer.gradients for layer in layers) / layout.pipeline
        size = parameters + gradients if layout.sharding_stage == 1 else 0.0
        size += self.optimizer_copies * gradients / layout.sharding
        return micro_batches * slowest + waiting, size
