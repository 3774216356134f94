"""The choices of a search (shapes, first cuts, schedules), and the costs of each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

from fleetpipe.errors import ConfigError
from fleetpipe.partition import Bottleneck, fastest, uniform
from fleetpipe.profiling.cost_model import StageCost, Stages, costs_of
from fleetpipe.profiling.memory import Recompute, choose, peak_bytes
from fleetpipe.profiling.profile import Profile
from fleetpipe.schedules import Costs, Placement, Schedule, build
from fleetpipe.schedules.families.table import FAMILIES
from fleetpipe.schedules.families.variants import variants
from fleetpipe.schedules.placement import HEAD, SHAPES
from fleetpipe.schedules.simulation import replay

#: Most chunks on a rank that are tried.
MOST_CHUNKS = 4

Boundaries = tuple[int, ...]


class Candidate(NamedTuple):
    """A plan that fits into memory, with its costs.

    Attributes:
        seconds: Time from the first action to the end of the last.
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
        search: The parts of the plan to choose; see :func:`fleetpipe.plan`.
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
        """The costs of stages."""
        return self.profile.stages

    def shapes(self) -> list[Placement]:
        """Returns the placements with no more stages than the model can be cut into."""
        most = len(self.profile.cuts) + 1
        if self.profile.body < len(self.profile.layers):
            return [Placement(f"loop{HEAD}", self.ranks)]
        searched = "placement" in self.search and self.ranks > 1
        shapes = [
            Placement(name, self.ranks, chunks)
            for chunks in range(1, MOST_CHUNKS + 1 if searched else 2)
            for name, shape in SHAPES.items()
            if shape.allows(chunks)
        ]
        return [shape for shape in shapes if shape.stages <= most]

    def schedules(self, shape: Placement) -> Iterator[Schedule]:
        """Yields the schedules to try on a placement; only the usual one if none is searched."""
        if "schedule" not in self.search and shape.shape == "loop":
            yield self._build("1F1B", shape)
            return
        for name, family in FAMILIES.items():
            if family.placement != shape.shape or family.chunks > shape.chunks:
                continue
            for options in self._options(name):
                try:
                    schedule = self._build(name, shape, **options)
                except ConfigError:  # it does not take these numbers
                    continue
                runs = self.profile.splits or not schedule.splits_backward
                if schedule.placement == shape and runs:
                    yield schedule

    def _options(self, name: str) -> list[dict[str, Any]]:
        """Returns the options of a family to try; the measured slices for a family of slices."""
        slices = len(self.profile.slices)
        if FAMILIES[name].sliced:
            return [{"slices": slices}] if slices > 1 else []
        return variants(name, self.micro_batches, self._hidden_latency)

    @cached_property
    def _hidden_latency(self) -> float:
        """The longest latency, divided by the time of F and B of an even share of the layers."""
        sizes = [layer.output for layer in self.profile.layers[:-1]]
        latency = max(link.seconds(max(sizes, default=0)) for link in self.profile.links)
        share = self.stages.least() / self.ranks
        return min(latency / share, self.micro_batches) if share else 0.0

    @cached_property
    def of_slices(self) -> tuple[Stages, ...]:
        """The costs of stages for each slice of a micro-batch."""
        return self.profile.stages_of_slices

    def cuts(self, shape: Placement) -> list[Boundaries]:
        """Returns the first cuts to try: even in layers, in time, in time with links, in memory."""
        parts, places, count = shape.body, self.profile.cuts, self.profile.body
        units = [0, *places]
        even = tuple(units[index] for index in uniform(len(units), parts)[:-1])
        # Each part of a head is a stage; so is the loss.
        head = range(count + 1, self.stages.count + 1)
        tried: list[Boundaries] = [(*even, count)]
        if "partition" not in self.search:
            return [(*even, count, *head)]
        stages = self.stages

        def time(stage: int, start: int, end: int) -> float:
            return stages.seconds(start, end)

        def memory(stage: int, start: int, end: int) -> float:
            return self._memory(parts, stage, start, end)

        def static(start: int, end: int) -> float:
            return sum(stages.static(start, end))

        tried += [
            fastest(places, count, parts, time, stages.seconds).boundaries,
            self.fastest(shape).boundaries,
            fastest(places, count, parts, memory, static).boundaries,
        ]
        return [(*cut, *head) for cut in dict.fromkeys(tried)]

    def fastest(self, shape: Placement, cap: float = math.inf) -> Bottleneck:
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
        crossing = cache(lambda border, layer: self._crossing(shape, border, layer))

        def cost(stage: int, start: int, end: int) -> float:
            if cap < math.inf and self._memory(parts, stage, start, end) > cap:
                return math.inf
            busy, waiting = crossing(stage - 1, start)
            return stages.seconds(start, end) + busy + waiting + crossing(stage, end)[0]

        def bytes_sent(start: int) -> int:
            return self.profile.layers[start - 1].output if start else 0

        places, count = self.profile.cuts, self.profile.body
        return fastest(places, count, parts, cost, stages.seconds, bytes_sent)

    def _crossing(self, shape: Placement, border: int, layer: int) -> tuple[float, float]:
        """Returns how long a value before ``layer`` keeps both ranks busy and delays the later."""
        if not 0 < layer < self.stages.count or shape.rank_of(border) == shape.rank_of(border + 1):
            return 0.0, 0.0
        size, transfer = self.profile.layers[layer - 1].output, self.profile.transfer
        # The rank receives a value and sends its gradient back.
        return transfer.sends(size) + transfer.receives(size), 2 * self._comm(shape, border, size)

    def _memory(self, parts: int, stage: int, start: int, end: int) -> float:
        """Returns the bytes that a stage uses under 1F1B."""
        parameters, gradients, buffers = self.stages.static(start, end)
        under_way = min(self.micro_batches, parts - stage)
        moments = self.optimizer_copies * gradients
        held = under_way * self.stages.held(start, end)
        return parameters + gradients + buffers + moments + held

    def costs(self, shape: Placement, stages: Sequence[StageCost], **options: Any) -> Costs:
        """Returns the costs of the actions of some stages, their transfers included."""
        stages = self.with_transfers(shape, stages)
        return costs_of(stages, self.comm(shape, stages), **options)

    def with_transfers(
        self, shape: Placement, stages: Sequence[StageCost]
    ) -> tuple[StageCost, ...]:
        """Adds to the costs of stages the time to send and receive between ranks."""
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
        """Returns how long a value takes from each stage to the next; 0 from the last."""
        edges = [self._comm(shape, s, stage.output) for s, stage in enumerate(stages[:-1])]
        return (*edges, 0.0)

    def _comm(self, shape: Placement, stage: int, size: int) -> float:
        """Returns how long ``size`` bytes take from a stage to the next one."""
        if shape.rank_of(stage) == shape.rank_of(stage + 1):
            return 0.0
        return self.profile.link(shape.link_of(stage)).seconds(size)

    def evaluate(self, schedule: Schedule, boundaries: Boundaries) -> Candidate | Lack:
        """Returns the time and peak memory of a schedule on a cut, and the recompute that it needs.

        If some rank exceeds the memory cap even with recompute, a ``Lack`` says by how much.

        A schedule of slices recomputes nothing.
        """
        stages, copies, shape = self.stages, self.optimizer_copies, schedule.placement
        slices = [one.cut(boundaries) for one in self.of_slices if schedule.slices > 1]
        chosen: Recompute = ((),) * (len(boundaries) - 1)
        costs = stages.cut(boundaries)
        peaks = peak_bytes(schedule, costs, copies, slices)
        if max(peaks) > self.cap and "recompute" in self.search and not slices:
            layers = self.profile.layers
            chosen = choose(schedule, layers, stages, boundaries, self.cap, copies)
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
