"""The choices of the planner (placements, first cuts, schedules), and the costs of each plan.

A cut is a tuple of boundaries: the first layer of each stage, and last the number of layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

from fleetpipe.errors import ConfigError
from fleetpipe.partition import Bottleneck, fastest, uniform
from fleetpipe.profiling.cost_model import StageCost, Stages, costs_of
from fleetpipe.profiling.memory import Recompute, choose_recompute, peak_bytes
from fleetpipe.profiling.profile import Profile
from fleetpipe.schedules import Costs, Placement, Schedule, build
from fleetpipe.schedules.families.table import FAMILIES
from fleetpipe.schedules.families.variants import variants
from fleetpipe.schedules.placement import HEAD, SHAPES
from fleetpipe.schedules.simulation import replay

#: The most chunks on a rank that the planner tries.
MOST_CHUNKS = 4

#: A cut: the first layer of each stage, then the number of layers.
Boundaries = tuple[int, ...]


class Candidate(NamedTuple):
    """A plan that fits into memory, with its costs.

    Attributes:
        seconds: Seconds of a batch, from its first action to the end of its last.
        peak: The most bytes of any rank.
        schedule: The schedule that runs.
        boundaries: The cut.
        recompute: For each stage the layers that are recomputed.
    """

    seconds: float
    peak: int
    schedule: Schedule
    boundaries: Boundaries
    recompute: Recompute


class Lack(NamedTuple):
    """A plan that does not fit into memory, even with all layers recomputed.

    Attributes:
        peak: The most bytes of any rank.
        rank: The rank that needs them.
        schedule: The schedule that runs.
        boundaries: The cut.
    """

    peak: int
    rank: int
    schedule: Schedule
    boundaries: Boundaries


@dataclass(frozen=True)
class PlanTask:
    """The task of a search: model, ranks, memory cap and choices.

    Attributes:
        profile: The costs of the layers.
        ranks: Ranks of the pipeline, p.
        micro_batches: Micro-batches of a batch, m.
        cap: Bytes that a rank may use.
        search: The parts of the plan to choose: "partition", "placement", "schedule", "recompute".
        optimizer_copies: Tensors of the size of a gradient in the optimizer's state.
    """

    profile: Profile
    ranks: int
    micro_batches: int
    cap: float
    search: frozenset[str]
    optimizer_copies: float

    @cached_property
    def stages(self) -> Stages:
        """The costs of any stage that consists of successive layers."""
        return self.profile.stages

    def shapes(self) -> list[Placement]:
        """Returns the placements to try, with no more stages than the model can be cut into."""
        most = len(self.profile.cuts) + 1
        if self.profile.body < len(self.profile.layers):
            return [Placement(f"loop{HEAD}", self.ranks)]
        several = "placement" in self.search and self.ranks > 1
        shapes = [
            Placement(name, self.ranks, chunks)
            for chunks in range(1, MOST_CHUNKS + 1 if several else 2)
            for name, shape in SHAPES.items()
            if shape.allows(chunks)
        ]
        return [shape for shape in shapes if shape.stages <= most]

    def schedules(self, shape: Placement) -> Iterator[Schedule]:
        """Yields the schedules to try on a placement: 1F1B alone if schedules are not searched."""
        if "schedule" not in self.search and shape.shape == "loop":
            yield self._build("1F1B", shape)
            return
        for name, family in FAMILIES.items():
            if family.placement != shape.shape or family.chunks > shape.chunks:
                continue
            for options in self._options_to_try(name):
                try:
                    schedule = self._build(name, shape, **options)
                except ConfigError:  # it does not take these numbers
                    continue
                runs = self.profile.splits or not schedule.splits_backward
                if schedule.placement == shape and runs:
                    yield schedule

    def _options_to_try(self, name: str) -> list[dict[str, Any]]:
        """Returns the sets of options with which to try a family.

        A family that cuts sequences is tried with the number of slices of the profile alone.
        """
        slices = len(self.profile.slices)
        if FAMILIES[name].sliced:
            return [{"slices": slices}] if slices > 1 else []
        return variants(name, self.micro_batches, self._latency_in_shares)

    @cached_property
    def _latency_in_shares(self) -> float:
        """The longest latency of a link, in units of F and B of an even share of the layers."""
        sizes = [layer.output for layer in self.profile.layers[:-1]]
        latency = max(link.seconds(max(sizes, default=0)) for link in self.profile.links)
        share = self.stages.least() / self.ranks
        return min(latency / share, self.micro_batches) if share else 0.0

    @cached_property
    def of_slices(self) -> tuple[Stages, ...]:
        """For each slice of a micro-batch the costs of any stage; empty without slices."""
        return self.profile.stages_of_slices

    def cuts(self, shape: Placement) -> list[Boundaries]:
        """Returns the first cuts to try on a placement.

        The cuts are even in the number of layers, in time, in time with transfers, and in memory;
        the result has only the first one if cuts are not searched.
        """
        parts, places, count = shape.body, self.profile.cuts, self.profile.body
        starts = [0, *places]
        even = tuple(starts[index] for index in uniform(len(starts), parts)[:-1])
        # Each part of a head is a stage; so is the loss.
        head = range(count + 1, self.stages.count + 1)
        body_cuts: list[Boundaries] = [(*even, count)]
        if "partition" not in self.search:
            return [(*even, count, *head)]
        stages = self.stages

        def time(stage: int, start: int, end: int) -> float:
            return stages.seconds(start, end)

        def memory(stage: int, start: int, end: int) -> float:
            return self._bytes_under_1f1b(parts, stage, start, end)

        def static(start: int, end: int) -> float:
            return sum(stages.static(start, end))

        body_cuts += [
            fastest(places, count, parts, time, stages.seconds).boundaries,
            self.fastest_cut(shape).boundaries,
            fastest(places, count, parts, memory, static).boundaries,
        ]
        return [(*cut, *head) for cut in dict.fromkeys(body_cuts)]

    def fastest_cut(self, shape: Placement, cap: float = math.inf) -> Bottleneck:
        """Returns the cut whose slowest stage is fastest, transfers between ranks included.

        Of cuts that are equally fast within the noise of measurements it takes the one that sends
        least, so that each measurement of a model gives the same cut.

        Args:
            shape: The placement of stages on ranks.
            cap: Bytes that a stage may use, with nothing recomputed.

        Raises:
            PartitionError: There are too few places, or no cut fits.
        """
        parts, stages = shape.body, self.stages
        transfer_times = cache(
            lambda stage_before, layer: self._transfer_times(shape, stage_before, layer)
        )

        def cost(stage: int, start: int, end: int) -> float:
            """Returns the seconds of a stage of layers ``start`` to ``end - 1``, with transfers."""
            if cap < math.inf and self._bytes_under_1f1b(parts, stage, start, end) > cap:
                return math.inf
            busy, waiting = transfer_times(stage - 1, start)
            return stages.seconds(start, end) + busy + waiting + transfer_times(stage, end)[0]

        def bytes_sent(start: int) -> int:
            """Returns the bytes that a stage beginning with layer ``start`` receives."""
            return self.profile.layers[start - 1].output if start else 0

        places, count = self.profile.cuts, self.profile.body
        return fastest(places, count, parts, cost, stages.seconds, bytes_sent)

    def _transfer_times(
        self, shape: Placement, stage_before: int, layer: int
    ) -> tuple[float, float]:
        """Returns the times of the transfers between two stages, for one micro-batch.

        Args:
            shape: The placement.
            stage_before: The stage that sends values and receives their gradients.
            layer: The first layer of the next stage.

        Returns:
            The seconds for which the transfers keep each of the two ranks busy, and the latency of
            a value and its gradient; both are 0 if the stages are on one rank.
        """
        if not 0 < layer < self.stages.count or shape.rank_of(stage_before) == shape.rank_of(
            stage_before + 1
        ):
            return 0.0, 0.0
        size, transfer = self.profile.layers[layer - 1].output, self.profile.transfer
        # The rank receives a value and sends its gradient back.
        return transfer.sends(size) + transfer.receives(size), 2 * self._latency(
            shape, stage_before, size
        )

    def _bytes_under_1f1b(self, parts: int, stage: int, start: int, end: int) -> float:
        """Returns the bytes that stage ``stage`` of ``parts`` uses under 1F1B.

        The stage consists of the layers ``start`` to ``end - 1``.
        """
        parameters, gradients, buffers = self.stages.static(start, end)
        forwards = min(self.micro_batches, parts - stage)
        moments = self.optimizer_copies * gradients
        held = forwards * self.stages.held(start, end)
        return parameters + gradients + buffers + moments + held

    def costs(self, shape: Placement, stages: Sequence[StageCost], **options: Any) -> Costs:
        """Returns the costs of all actions of a cut, for a simulation.

        Args:
            shape: The placement of the stages.
            stages: The costs of the stages, without transfers.
            options: Further fields of ``Costs``.
        """
        stages = self.with_transfers(shape, stages)
        return costs_of(stages, self.comm(shape, stages), **options)

    def with_transfers(
        self, shape: Placement, stages: Sequence[StageCost]
    ) -> tuple[StageCost, ...]:
        """Returns the costs of all stages with the seconds that transfers keep their ranks busy.

        Args:
            shape: The placement of the stages.
            stages: The costs of the stages, without transfers.
        """
        transfer, costs = self.profile.transfer, []
        for number, stage in enumerate(stages):
            forward = backward = 0.0
            if number and shape.rank_of(number - 1) != shape.rank_of(number):
                forward += transfer.receives(stages[number - 1].output)
                backward += transfer.sends(stages[number - 1].output)
            if number + 1 < len(stages) and shape.rank_of(number) != shape.rank_of(number + 1):
                forward += transfer.sends(stage.output)
                backward += transfer.receives(stage.output)
            costs.append(
                stage._replace(
                    forward=stage.forward + forward,
                    backward=stage.backward + backward,
                    input_grad=stage.input_grad + backward,
                )
            )
        return tuple(costs)

    def comm(self, shape: Placement, stages: Sequence[StageCost]) -> tuple[float, ...]:
        """Returns for each stage the seconds that its output takes to the next; 0 for the last."""
        edges = [self._latency(shape, s, stage.output) for s, stage in enumerate(stages[:-1])]
        return (*edges, 0.0)

    def _latency(self, shape: Placement, stage: int, size: int) -> float:
        """Returns the seconds that ``size`` bytes take from a stage to the next one."""
        if shape.rank_of(stage) == shape.rank_of(stage + 1):
            return 0.0
        return self.profile.link(shape.link_of(stage)).seconds(size)

    def evaluate(self, schedule: Schedule, boundaries: Boundaries) -> Candidate | Lack:
        """Returns the plan of a schedule and a cut, with the recompute that the memory cap needs.

        A schedule that cuts sequences recomputes nothing.

        Returns:
            A ``Lack`` if some rank exceeds the cap even with recompute, else a ``Candidate``.
        """
        stages, copies, shape = self.stages, self.optimizer_copies, schedule.placement
        slices = [costs.cut(boundaries) for costs in self.of_slices if schedule.slices > 1]
        chosen: Recompute = ((),) * (len(boundaries) - 1)
        costs = stages.cut(boundaries)
        peaks = peak_bytes(schedule, costs, copies, slices)
        if max(peaks) > self.cap and "recompute" in self.search and not slices:
            layers = self.profile.layers
            chosen = choose_recompute(schedule, layers, stages, boundaries, self.cap, copies)
            costs = stages.cut(boundaries, chosen)
            peaks = peak_bytes(schedule, costs, copies)
        most = max(peaks)
        if most > self.cap:
            return Lack(most, peaks.index(most), schedule, boundaries)
        each = tuple(self.costs(shape, part) for part in slices) or None
        times = replay(schedule, None, self.costs(shape, costs, each_slice=each))
        seconds = max(ends[-1] for ends in times.ends)
        return Candidate(seconds, most, schedule, boundaries, chosen)

    def _build(self, name: str, shape: Placement, **options: Any) -> Schedule:
        """Builds the schedule of a family for a placement."""
        return build(
            name,
            ranks=shape.ranks,
            micro_batches=self.micro_batches,
            chunks=shape.chunks,
            head=shape.has_head,
            **options,
        )

    def bound(self) -> float:
        """Returns a lower bound of the time of any cut, placement and schedule, in seconds.

        Some rank computes at least its even share. Also, the rank of any layer cannot begin before
        the earlier layers have run once, and after its last I those layers still have to run I.
        """
        layers = self.profile.layers[: self.profile.body]
        if self.of_slices:
            # A slice does not wait for later ones, and may cost less than its share.
            least = min(self.stages.least(), sum(part.least() for part in self.of_slices))
            return self.micro_batches * least / self.ranks
        most = self.micro_batches * self.stages.least() / self.ranks
        before = 0.0
        for layer in layers:
            input_grad = math.inf if layer.input_grad is None else layer.input_grad
            way = layer.forward + min(layer.whole, input_grad)
            most = max(most, before + self.micro_batches * way, self.micro_batches * layer.seconds)
            before += way
        return most
