"""Lowers a schedule to a plan in which no two ranks can block each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain as concatenate

from fleetpipe.schedules.action import Action
from fleetpipe.schedules.costs import Costs
from fleetpipe.schedules.edges import Edge, checked_edges, crossing_edges
from fleetpipe.schedules.garbage import collector_paused
from fleetpipe.schedules.operations import Free, Op, Recv, Reduce, Send, Step
from fleetpipe.schedules.play.replay import replay
from fleetpipe.schedules.rows import PlanRows, ScheduleRows


def lower(schedule: ScheduleRows, edges: Iterable[Edge] | None = None) -> PlanRows:
    """Lowers a schedule; see ``Schedule.lower``.

    All entries of all ranks are put into one linear order, that of their simulated ends, and every
    transfer is written into both its ranks' rows at one place of that order. So the rows are
    projections of one order, and a send can wait for its receive, or a receive for its send,
    without ever closing a circle.
    """
    placement = schedule.placement
    ends = replay(schedule, edges, Costs()).ends
    ordered_edges = checked_edges(edges, placement.stages)
    emitter = _Emitter(schedule, ordered_edges)
    times = list(concatenate.from_iterable(ends))
    owners = [rank for rank, row in enumerate(ends) for _ in row]
    rows = [iter(row) for row in schedule.actions]
    with collector_paused():
        # The sort is stable: a rank's own order is kept, and ranks that tie follow their number.
        for index in sorted(range(len(times)), key=times.__getitem__):
            rank = owners[index]
            item = next(rows[rank])
            emitter.rows[rank].append(item)
            for action in (item,) if isinstance(item, Action) else item.actions:
                emitter.follow(rank, action)
    if not schedule.forward_only:
        for row in emitter.rows:
            row += (Reduce(), Step())
    return PlanRows(
        schedule.name,
        placement,
        schedule.micro_batches,
        ordered_edges,
        tuple(map(tuple, emitter.rows)),
        schedule.forward_only,
    )


class _Emitter:
    """The rows of a plan that is being written."""

    def __init__(self, schedule: ScheduleRows, edges: Sequence[Edge]) -> None:
        self.rows: list[list[Op]] = [[] for _ in range(schedule.placement.ranks)]
        self.forward_only = schedule.forward_only
        self.leaving, self.entering = crossing_edges(schedule.placement, edges)

    def follow(self, rank: int, action: Action) -> None:
        """Writes what follows an action: transfers, for which a peer waits, then a release."""
        kind, stage, micro_batch = action
        row = self.rows[rank]
        if kind == "F":
            for edge, peer in self.leaving[stage]:
                row.append(Send("F", edge, micro_batch))
                self.rows[peer].append(Recv("F", edge, micro_batch))
        elif kind != "W":
            for edge, peer in self.entering[stage]:
                row.append(Send("B", edge, micro_batch))
                self.rows[peer].append(Recv("B", edge, micro_batch))
        if kind in ("B", "W") or self.forward_only:
            row.append(Free(stage, micro_batch))
