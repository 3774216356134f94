"""Lowers a schedule to a plan in which no two ranks can block each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain as concatenate
from itertools import repeat
from typing import TypeVar

from fleetpipe.schedules.action import KINDS, Action, numbers
from fleetpipe.schedules.costs import Costs
from fleetpipe.schedules.edges import Edge, checked_edges, crossing_edges
from fleetpipe.schedules.garbage import collector_paused
from fleetpipe.schedules.plan_ops import Free, Op, Recv, Reduce, Send, Step
from fleetpipe.schedules.rows import PlanRows, ScheduleRows
from fleetpipe.schedules.simulation.replay import replay

#: What appends to a row, and the ops of all micro-batches that it appends.
_Following = tuple[Callable[[Op], None], Sequence[Op]]

_Written = TypeVar("_Written", Send, Recv, Free)


def lower(schedule: ScheduleRows, edges: Iterable[Edge] | None = None) -> PlanRows:
    """Lowers a schedule; see ``Schedule.lower``.

    All entries of all ranks are put into one linear order, that of their simulated ends, and every
    transfer is written into both its ranks' rows at one place of that order. So all rows follow one
    order, and sends and receives that wait for each other never form a cycle.
    """
    placement = schedule.placement
    ends = replay(schedule, edges, Costs()).ends
    ordered_edges = checked_edges(edges, placement)
    times = list(concatenate.from_iterable(ends))
    owners = [rank for rank, row in enumerate(ends) for _ in row]
    items = [iter(row) for row in schedule.actions]
    with collector_paused():
        emitter = _Emitter(schedule, ordered_edges)
        following = emitter.following
        appends = [row.append for row in emitter.rows]
        # The sort is stable: a rank's own order is kept, and ranks that tie follow their number.
        for index in sorted(range(len(times)), key=times.__getitem__):
            rank = owners[index]
            item = next(items[rank])
            appends[rank](item)
            for kind, stage, micro_batch in (item,) if isinstance(item, Action) else item.actions:
                for append, ops in following[kind][stage]:
                    append(ops[micro_batch])
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
        schedule.slices,
        schedule.options,
    )


class _Emitter:
    """Writes the rows of a plan.

    The operations after an action are created for all micro-batches at once, since creating
    millions of them one by one would take most of the time.
    """

    def __init__(self, schedule: ScheduleRows, edges: Sequence[Edge]) -> None:
        placement = schedule.placement
        self.numbers = numbers(schedule.micro_batches, schedule.slices)
        self.rows: list[list[Op]] = [[] for _ in range(placement.ranks)]
        leaving, entering = crossing_edges(placement, edges)
        #: By kind and stage: into which rows what of each micro-batch is written.
        self.following: dict[str, list[list[_Following]]] = {kind: [] for kind in KINDS}
        for stage in range(placement.stages):
            row = self.rows[placement.rank_of(stage)]
            values = [follow for end in leaving[stage] for follow in self._transfers("F", row, end)]
            frees: list[_Following] = [(row.append, self._all(Free, stage, letter="FREE"))]
            grads: list[_Following] = []
            if not schedule.forward_only:
                for end in entering[stage]:
                    grads += self._transfers("B", row, end)
            self.following["F"].append(values + frees * schedule.forward_only)
            self.following["B"].append(grads + frees)
            self.following["I"].append(grads)
            self.following["W"].append(frees)

    def _transfers(self, kind: str, row: list[Op], end: tuple[Edge, int]) -> list[_Following]:
        """Returns the sends of an edge's value or gradient, with the receives of the other rank."""
        edge, peer = end
        return [
            (row.append, self._all(Send, kind, edge, letter="S")),
            (self.rows[peer].append, self._all(Recv, kind, edge, letter="R")),
        ]

    def _all(self, written: type[_Written], *first: object, letter: str) -> Sequence[_Written]:
        """Returns an op for each micro-batch or slice, without a Python call for each."""
        fields = zip(*map(repeat, first), self.numbers, repeat(letter))
        return list(map(partial(tuple.__new__, written), fields))
