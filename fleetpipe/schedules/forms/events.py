"""Simulated or measured events, from which pictures and traces are drawn."""

from __future__ import annotations

from bisect import bisect, insort
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median_low
from typing import NamedTuple

from fleetpipe.schedules.action import Action, Fused, Item, flatten, parts
from fleetpipe.schedules.plan_ops import Op, parse_op
from fleetpipe.schedules.simulation.timeline import Timeline


class Event(NamedTuple):
    """One thing that a rank did, as plain values that can be sent and saved.

    Attributes:
        rank: The rank.
        name: What it did, as a plan writes it: "F0.3", "(F0.3|B1.2)", "SF0>1.3", "STEP"; or
            any other word.
        start: When it began: seconds if measured, else the unit of the costs.
        end: When it ended.
        exchange: The part of that time in which the rank only waited for exchanges with other ranks
            of its stage.
        early: How many actions that stand before it in the schedule began later on its rank.
        queued: The part of that time in which the rank waited for a processor.
    """

    rank: int
    name: str
    start: float
    end: float
    exchange: float = 0.0
    early: int = 0
    queued: float = 0.0

    @property
    def op(self) -> Op | None:
        """The operation that the name denotes, or None if it is not one of a plan."""
        return parse_op(self.name)

    @property
    def actions(self) -> tuple[Action, ...]:
        """The actions computed: one, several if they are fused, none in a transfer."""
        op = self.op
        return parts(op) if isinstance(op, (Action, Fused)) else ()


class Figures(NamedTuple):
    """The bubble of some events, as ``Timeline`` has it.

    Attributes:
        span: Longest time that a rank takes from its first action to its last.
        busy: Most that any rank computes.
    """

    span: float
    busy: float

    @property
    def bubble(self) -> float:
        """Time lost: span - busy."""
        return self.span - self.busy

    @property
    def bubble_rate(self) -> float:
        """Share of the span that is lost, 0..1."""
        return self.bubble / self.span if self.span else 0.0


def events_of(timeline: Timeline) -> list[Event]:
    """Returns the events of a simulated schedule, rank after rank."""
    return [
        Event(rank, str(item), start, end, timeline.exchange_in(item))
        for rank, row in enumerate(timeline.events)
        for item, start, end in row
    ]


def figures_of(events: Iterable[Event]) -> Figures:
    """Returns the bubble of the actions among ``events``; other events do not count."""
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    busy: defaultdict[int, float] = defaultdict(float)
    for event in events:
        if event.actions:
            begins[event.rank] = min(begins.get(event.rank, event.start), event.start)
            ends[event.rank] = max(ends.get(event.rank, event.end), event.end)
            busy[event.rank] += event.end - event.start
    spans = [ends[rank] - begin for rank, begin in begins.items()]
    return Figures(max(spans, default=0), max(busy.values(), default=0))


def with_early(events: Sequence[Event], rows: Sequence[Iterable[Item]]) -> list[Event]:
    """Returns the events of one measured step that say which actions were taken early.

    Args:
        events: The events.
        rows: For each rank the entries of the schedule, in order.
    """
    places = {
        (rank, str(action)): place
        for rank, row in enumerate(rows)
        for place, action in enumerate(flatten(row))
    }
    behind: list[list[int]] = [[] for _ in rows]
    marked = [*events]
    for index in sorted(range(len(events)), key=lambda index: -events[index].start):
        event = events[index]
        place = places.get((event.rank, event.name))
        if place is not None:
            marked[index] = event._replace(early=bisect(behind[event.rank], place))
            insort(behind[event.rank], place)
    return marked


def median_step(steps: Sequence[Sequence[Event]]) -> int:
    """Returns the index of the step with the median bubble rate, which no single delay distorts."""
    rates = [figures_of(step).bubble_rate for step in steps]
    return rates.index(median_low(rates))
