"""Plays a schedule against costs: when each action runs, how large the bubble is, what is held."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fleetpipe.schedules.action import Item
from fleetpipe.schedules.costs import Costs
from fleetpipe.schedules.edges import Edge
from fleetpipe.schedules.rows import ScheduleRows
from fleetpipe.schedules.simulation.held import held_around
from fleetpipe.schedules.simulation.replay import replay


@dataclass(frozen=True, repr=False)
class Timeline:
    """What a simulation found. Times are in the unit of the costs.

    Args:
        schedule: The schedule that was simulated.
        costs: What its actions cost.
        starts: For each rank, when each of its entries begins.
        ends: Likewise, ends.
        makespan: From time 0 to the end of the last action of any rank.
        spans: For each rank the time from the start of its first action to the end of its last.
        busy: Most that any rank computes.
        peak_activations: For each rank, most forwards whose activations are held at once, in
            forwards of one stage.
        peak_bytes: Likewise in bytes, where the costs give them; else None.
    """

    schedule: ScheduleRows
    costs: Costs
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    makespan: float
    spans: tuple[float, ...]
    busy: float
    peak_activations: tuple[float, ...]
    peak_bytes: tuple[float, ...] | None

    @property
    def span(self) -> float:
        """Longest time that a rank takes from its first action to its last."""
        return max(self.spans)

    @property
    def bubble(self) -> float:
        """Time lost: span - busy."""
        return self.span - self.busy

    @property
    def bubble_rate(self) -> float:
        """Share of the span that is lost, 0..1."""
        return self.bubble / self.span if self.span else 0.0

    @property
    def events(self) -> tuple[tuple[tuple[Item, float, float], ...], ...]:
        """For each rank, its entries as (action or fused unit, start, end)."""
        rows = zip(self.schedule.actions, self.starts, self.ends)
        return tuple(tuple(zip(row, starts, ends)) for row, starts, ends in rows)

    def __repr__(self) -> str:
        return (
            f"<Timeline of {self.schedule.name}: span {self.span:g}, bubble {self.bubble:g}"
            f" ({self.bubble_rate:.2%})>"
        )


def simulate(
    schedule: ScheduleRows, costs: Costs | None = None, edges: Iterable[Edge] | None = None
) -> Timeline:
    """Plays a schedule; see ``Schedule.simulate``."""
    placement = schedule.placement
    costs = (costs or Costs()).without_loss(placement)
    costs.check_stages(placement.stages)
    times = replay(schedule, edges, costs)
    ranks = range(placement.ranks)
    spans = tuple(ends[-1] - starts[0] for starts, ends in zip(times.starts, times.ends))
    return Timeline(
        schedule,
        costs,
        times.starts,
        times.ends,
        makespan=max(ends[-1] for ends in times.ends),
        spans=spans,
        busy=max(times.busy),
        peak_activations=tuple(_peak(schedule, rank, costs) for rank in ranks),
        peak_bytes=None
        if costs.bytes is None
        else tuple(_peak(schedule, rank, costs, in_bytes=True) for rank in ranks),
    )


def _peak(schedule: ScheduleRows, rank: int, costs: Costs, *, in_bytes: bool = False) -> float:
    return max(held.during for held in held_around(schedule, rank, costs, in_bytes=in_bytes))
