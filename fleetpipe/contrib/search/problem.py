"""The input of a search: the stages, their costs, and how much each rank may hold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from fleetpipe.errors import ConfigError
from fleetpipe.schedules.action import Action, flatten
from fleetpipe.schedules.costs import Costs
from fleetpipe.schedules.placement import Placement
from fleetpipe.schedules.rows import ScheduleRows
from fleetpipe.schedules.simulation.timeline import Timeline

#: Kinds in the order of their columns, S of each.
COLUMNS = "FIW"


@dataclass(frozen=True)
class Problem:
    """A placement, m and costs for which the search looks for an order of actions.

    Orders are rows of integers, so that a search costs little: with S stages the action (kind,
    stage, k) has the code ``k * 3S + column``, where the columns of F begin at 0, those of I at S,
    and those of W at 2S. The codes of one micro-batch are adjacent, so what an action waits for is
    at a fixed distance.

    Args:
        placement: Which rank owns which stage.
        micro_batches: Micro-batches of a batch, m.
        costs: The time and memory of actions.
        cap: Most that a rank may hold at once, in forwards of one stage, or in bytes if the costs
            give bytes.
    """

    placement: Placement
    micro_batches: int
    costs: Costs
    cap: float = math.inf

    @property
    def width(self) -> int:
        """Distance between the codes of one action in consecutive micro-batches."""
        return 3 * self.placement.stages

    @property
    def length(self) -> int:
        """Number of actions, which are F, I and W of each stage and micro-batch."""
        return 3 * self.placement.stages * self.micro_batches

    @cached_property
    def durations(self) -> list[float]:
        """Time of the action in each column of a code."""
        stages = range(self.placement.stages)
        return [self.costs.of(kind, stage) for kind in COLUMNS for stage in stages]

    @cached_property
    def amounts(self) -> list[float]:
        """The memory that a forward of each stage holds."""
        if self.costs.bytes is None:
            return [1] * self.placement.stages
        return [self.costs.bytes_of(Action("F", s, 0)) for s in range(self.placement.stages)]

    @cached_property
    def waits(self) -> list[tuple[int, float]]:
        """For each column of F and I the distance to the action it waits for, and the latency.

        Of several dependencies along a chain the last one implies the others. A distance of 0
        means that there is none.
        """
        stages, rank_of = self.placement.stages, self.placement.rank_of
        # The latency of the value that leaves a stage, and of its gradient.
        latencies = [
            self.costs.comm_of(stage) if rank_of(stage) != rank_of(stage + 1) else 0
            for stage in range(stages - 1)
        ]
        forwards = [(0, 0), *((-1, latency) for latency in latencies)]
        return [*forwards, *((1, latency) for latency in latencies), (-stages, 0)]

    @cached_property
    def followers(self) -> list[int]:
        """For each column of F and I the rank that its end may wake; -1 if there is none."""
        stages, rank_of = self.placement.stages, self.placement.rank_of
        forward = [rank_of(stage + 1) for stage in range(stages - 1)]
        return [*forward, -1, -1, *(rank_of(stage - 1) for stage in range(1, stages))]

    @cached_property
    def work(self) -> list[float]:
        """The total time of each rank's actions, summed once so that all searches agree."""
        stages, parts = self.placement.stages, range(3)
        return [
            self.micro_batches
            * sum(self.durations[part * stages + stage] for stage in owned for part in parts)
            for owned in map(self.placement.stages_of, range(self.placement.ranks))
        ]

    @cached_property
    def bound(self) -> float:
        """A lower bound of the span of any schedule with split backwards.

        Between the first F and the last W of rank 0 every other rank must be reached, compute
        all its F and I, and answer. (With several chunks only the work itself is counted.)
        """
        least = max(self.work)
        if self.placement.chunks > 1:
            return least
        ranks = self.placement.ranks
        forwards, input_grads = self.durations[:ranks], self.durations[ranks : 2 * ranks]
        way: float = 0
        for rank, (forward, input_grad) in enumerate(zip(forwards, input_grads)):
            around = way + self.micro_batches * (forward + input_grad) + self.durations[2 * ranks]
            least = max(least, around)
            way += forward + input_grad + 2 * self.costs.comm_of(rank)
        return least

    def check_cap(self) -> None:
        """Raises ConfigError if the cap does not let a single micro-batch pass."""
        ranks = range(self.placement.ranks)
        needs = [sum(self.amounts[s] for s in self.placement.stages_of(rank)) for rank in ranks]
        if not self.cap >= max(needs):
            rank = needs.index(max(needs))
            unit = "forwards of one stage" if self.costs.bytes is None else "bytes"
            stages = " and ".join(map(str, self.placement.stages_of(rank)))
            raise ConfigError(
                f"no schedule keeps within a memory cap of {self.cap:.10g} {unit}",
                where=f"rank {rank}, which holds one forward of stage {stages} at once",
                expected=f"a cap of at least {max(needs):.10g}",
                fix=f"raise the cap to {max(needs):.10g}",
            )

    def holds(self, timeline: Timeline) -> bool:
        """Whether no rank of a simulated schedule exceeds the cap."""
        if timeline.peak_bytes is not None:
            return max(timeline.peak_bytes) <= self.cap
        return max(timeline.peak_activations) / timeline.schedule.slices <= self.cap

    @property
    def hidden(self) -> float:
        """The longest latency, divided by the time of the shortest F and B of a stage."""
        stages, costs = range(self.placement.stages), self.costs
        latency = max(costs.comm_of(stage) for stage in stages)
        least = min(costs.of("F", stage) + costs.of("B", stage) for stage in stages)
        if latency == 0:
            return 0
        return min(latency / least, self.micro_batches) if least else self.micro_batches

    def order_of(self, schedule: ScheduleRows) -> list[list[int]]:
        """Returns the numbers of F and I of each rank in the order of a schedule; B counts as I."""
        width, first = self.width, {"F": 0, "I": self.placement.stages, "B": self.placement.stages}
        return [
            [k * width + first[kind] + stage for kind, stage, k in row if kind != "W"]
            for row in map(flatten, schedule.actions)
        ]

    def schedule_of(self, name: str, rows: list[list[int]]) -> ScheduleRows:
        """Returns the schedule with these rows of codes."""
        stages = self.placement.stages
        kinds = [(kind, stage) for kind in COLUMNS for stage in range(stages)]
        actions = tuple(
            tuple(Action(*kinds[code % self.width], code // self.width) for code in row)
            for row in rows
        )
        return ScheduleRows(name, self.placement, self.micro_batches, actions)
