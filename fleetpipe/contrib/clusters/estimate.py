"""Estimates a step under a layout: its time, the parts of that time, and each rank's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fleetpipe.contrib.clusters.cluster import Cluster
from fleetpipe.contrib.clusters.cutting import stages_of
from fleetpipe.contrib.clusters.layout import JobLayout
from fleetpipe.contrib.clusters.pipeline_time import (
    cached_schedule,
    most_held,
    pipeline_time,
    small,
)
from fleetpipe.contrib.clusters.workload import Workload
from fleetpipe.profiling.cost_model import LayerCost, StageCost

#: Matrices of a layer, each of which is gathered by itself.
_MATRICES = 4


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
        utilisation: FLOPs of the model, without recompute, over those that all devices could do
            (MFU); 0 if the model's are unknown.
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
        """Returns each layer's costs on a rank, with the gathers of its parameters in stage 3.

        Equal layers share one object.
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
        owned = _stages_of_ranks(layout)
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


def _stages_of_ranks(layout: JobLayout) -> list[Sequence[int]]:
    """Returns the stages of each rank."""
    schedule = cached_schedule(layout.schedule, layout.pipeline, 2 * layout.pipeline, layout.chunks)
    return [schedule.placement.stages_of(rank) for rank in range(layout.pipeline)]
