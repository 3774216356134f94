"""Simulates a schedule with costs: when each action runs, the bubble, and the memory in use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fleetpipe.schedules.action import Action, Item, parts
from fleetpipe.schedules.costs import Costs
from fleetpipe.schedules.edges import Edge
from fleetpipe.schedules.rows import ScheduleRows
from fleetpipe.schedules.simulation.replay import replay


class Amounts(NamedTuple):
    """The activations in flight on a rank during and after one of its entries.

    Attributes:
        during: While it runs, before it releases anything.
        after: When it has ended.
    """

    during: float
    after: float


def amounts_in_flight(
    schedule: ScheduleRows, rank: int, costs: Costs | None = None, *, in_bytes: bool = False
) -> Iterator[Amounts]:
    """Yields the activations in flight on a rank while each of its entries runs and after it.

    Those of a forward are in flight from its start; B releases them at its end, I the share
    ``costs.input_grad_frees`` of them and W the rest. In a forward-only schedule they are released
    at the end of the forward itself.

    Args:
        schedule: A schedule.
        rank: The rank.
        costs: Says what I releases, and the bytes of each stage. Default ``Costs()``.
        in_bytes: Count ``costs.bytes``, not forwards of one stage.
    """
    costs = costs or Costs()
    rest = 1 - costs.input_grad_frees
    by_slice = costs.by_slice(schedule.slices)
    slices = schedule.slices

    def amount_of(action: Action) -> float:
        return by_slice[action.micro_batch % slices].bytes_of(action)

    # Forwards of which nothing is released, and those of which only I is done. They are summed
    # apart and weighted last, so that no rounding error builds up.
    whole: float = 0
    halves: float = 0
    for item in schedule.actions[rank]:
        actions = (item,) if isinstance(item, Action) else item.actions
        for action in actions:
            if action[0] == "F":
                whole += amount_of(action) if in_bytes else 1
        during = whole + rest * halves
        for action in actions:
            kind = action[0]
            amount = amount_of(action) if in_bytes else 1
            if kind == "B" or kind == "I" or schedule.forward_only:
                whole -= amount
            if kind == "I":
                halves += amount
            elif kind == "W":
                halves -= amount
        yield Amounts(during, whole + rest * halves)


@dataclass(frozen=True, repr=False)
class Timeline:
    """The result of a simulation. Times are in the unit of the costs.

    Args:
        schedule: The schedule that was simulated.
        costs: What its actions cost.
        starts: For each rank, when each of its entries begins.
        ends: For each rank, when each of its entries ends.
        makespan: From time 0 to the end of the last action of any rank.
        spans: For each rank the time from the start of its first action to the end of its last.
        busy: Most that any rank computes.
        peak_activations: For each rank, most forwards whose activations are in flight at once, in
            forwards of one stage.
        peak_bytes: The same in bytes, if the costs give them; else None.
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

    def exchange_in(self, item: Item) -> float:
        """Returns the part of an entry in which its rank only waits for an exchange."""
        if not self.costs.exchange:
            return 0
        slices = self.schedule.slices
        return self.costs.by_slice(slices)[parts(item)[0].micro_batch % slices].exchange_in(item)

    def __repr__(self) -> str:
        return (
            f"<Timeline of {self.schedule.name}: span {self.span:g}, bubble {self.bubble:g}"
            f" ({self.bubble_rate:.2%})>"
        )


def simulate(
    schedule: ScheduleRows, costs: Costs | None = None, edges: Iterable[Edge] | None = None
) -> Timeline:
    """Simulates a schedule; see ``Schedule.simulate``."""
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
    return max(
        amount.during for amount in amounts_in_flight(schedule, rank, costs, in_bytes=in_bytes)
    )
