"""Runs the rows of a schedule against each other, each rank as far as its dependencies allow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fleetpipe.schedules.costs import Costs
from fleetpipe.schedules.edges import Dependencies, Edge, checked_edges
from fleetpipe.schedules.explain.stall import raise_stalled
from fleetpipe.schedules.play.encoding import COLUMNS, Encoding, Waits, encoding_of, waits_of
from fleetpipe.schedules.rows import ScheduleRows


@dataclass
class Replay:
    """When each entry of each rank begins and ends.

    Args:
        starts: For each rank, the time at which each of its entries begins.
        ends: Likewise, ends.
        busy: For each rank, the time that it computes in all.
    """

    starts: list[list[float]]
    ends: list[list[float]]
    busy: list[float]


def replay(schedule: ScheduleRows, edges: Iterable[Edge] | None, costs: Costs) -> Replay:
    """Returns the times of all entries.

    Every rank runs its row in order; an entry begins when its rank is free and all that it waits
    for has arrived. The result does not depend on the order in which ranks are visited.

    Raises:
        ScheduleError: Ranks wait for each other, or for something later in their own row; or the
            schedule is incomplete.
    """
    stages = encoding_of(schedule).stages
    dependencies = Dependencies(checked_edges(edges, stages), stages)
    runner = _Player(schedule, dependencies, costs)
    runner.run()
    reached = [len(ends) for ends in runner.times.ends]
    if reached != [len(row) for row in schedule.actions]:
        raise_stalled(schedule, dependencies, reached)
    return runner.times


class _Player:
    """The state of a replay: how far each rank is, and which rank waits for which slot."""

    def __init__(self, schedule: ScheduleRows, dependencies: Dependencies, costs: Costs) -> None:
        self.encoding = encoding = encoding_of(schedule)
        ranks, stages = schedule.placement.ranks, encoding.stages
        self.times = Replay(
            [[] for _ in range(ranks)], [[] for _ in range(ranks)], [0 for _ in range(ranks)]
        )
        self.shifts = encoding.shifts
        self.finished: list[float] = [-1] * (encoding.width * schedule.micro_batches)
        self.waits = waits_of(schedule.placement, dependencies, costs)
        self.fused_waits = _fused_waits(encoding, self.waits)
        self.durations = [costs.of(kind, stage) for kind in COLUMNS for stage in range(stages)]
        self.fused_durations = [costs.of_fused(unit) for _, unit in encoding.fused]
        # The ranks that wait for one slot are a linked list: the first here, the next there.
        self.first_waiting: dict[int, int] = {}
        self.next_waiting = [-1] * ranks

    def run(self) -> None:
        """Runs every rank as far as it gets; a rank that must wait is woken by what it lacks."""
        width, rows, waits = self.encoding.width, self.encoding.rows, self.waits
        first_waiting, next_waiting, finished = self.first_waiting, self.next_waiting, self.finished
        ready = list(range(len(rows)))
        while ready:
            rank = ready.pop()
            starts, ends = self.times.starts[rank], self.times.ends[rank]
            row, free = rows[rank], ends[-1] if ends else 0
            for position in range(len(ends), len(row)):
                code = row[position]
                begin = free
                for distance, delay in (
                    waits[code % width] if code >= 0 else self.fused_waits[-1 - code]
                ):
                    arrival = finished[code + distance]
                    if arrival < 0:
                        next_waiting[rank] = first_waiting.get(code + distance, -1)
                        first_waiting[code + distance] = rank
                        break
                    if arrival + delay > begin:
                        begin = arrival + delay
                else:
                    starts.append(begin)
                    free = self._finish(rank, code, begin, ready)
                    ends.append(free)
                    continue
                break

    def _finish(self, rank: int, code: int, begin: float, ready: list[int]) -> float:
        """Notes that ``code`` ended, wakes the ranks that waited for it, and returns the time."""
        shifts, width = self.shifts, len(self.shifts)
        if code >= 0:
            duration = self.durations[code % width]
            slots: tuple[int, ...] = (code - shifts[code % width],)
        else:
            duration = self.fused_durations[-1 - code]
            slots = tuple(c - shifts[c % width] for c in self.encoding.fused[-1 - code][0])
        self.times.busy[rank] += duration
        for slot in slots:
            self.finished[slot] = begin + duration
            waiting = self.first_waiting.pop(slot, -1)
            while waiting >= 0:
                ready.append(waiting)
                waiting = self.next_waiting[waiting]
        return begin + duration


def _fused_waits(encoding: Encoding, waits: Waits) -> Waits:
    """Returns the same for each fused unit, as distances from its (negative) code."""
    return [
        [
            (code + distance - (-1 - index), delay)
            for code in codes
            for distance, delay in waits[code % encoding.width]
        ]
        for index, (codes, _) in enumerate(encoding.fused)
    ]
