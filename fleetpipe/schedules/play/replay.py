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
        self.finished: list[float] = [-1] * (encoding.width * schedule.units)
        slices = schedule.slices
        self.waits = waits_of(schedule.placement, dependencies, costs, slices)
        self.fused_waits = _fused_waits(encoding, self.waits)
        self.durations = [
            of_slice.of(kind, stage)
            for of_slice in costs.by_slice(slices)
            for kind in COLUMNS
            for stage in range(stages)
        ]
        self.fused_durations = [costs.of_fused(unit) for _, unit in encoding.fused]
        # In the place of the time of a slot that is not finished: -1, or -2 - rank for the last of
        # the ranks that wait for it. The others are a linked list.
        self.next_waiting: list[float] = [-1] * ranks

    def run(self) -> None:
        """Runs every rank as far as it gets; a rank that must wait is woken by what it lacks."""
        period, rows, waits = self.encoding.period, self.encoding.rows, self.waits
        finished, shifts, durations = self.finished, self.shifts, self.durations
        ready = list(range(len(rows)))
        while ready:
            rank = ready.pop()
            starts, ends = self.times.starts[rank], self.times.ends[rank]
            row, free, busy = rows[rank], ends[-1] if ends else 0, self.times.busy[rank]
            for position in range(len(ends), len(row)):
                code = row[position]
                column = code % period
                begin = free
                for distance, delay in waits[column] if code >= 0 else self.fused_waits[-1 - code]:
                    arrival = finished[code + distance]
                    if arrival < 0:
                        self.next_waiting[rank] = arrival
                        finished[code + distance] = -2 - rank
                        break
                    if arrival + delay > begin:
                        begin = arrival + delay
                else:
                    starts.append(begin)
                    if code >= 0:
                        busy += durations[column]
                        free = begin + durations[column]
                        slot = code - shifts[column]
                        if finished[slot] < -1:
                            self._wake(slot, ready)
                        finished[slot] = free
                    else:
                        busy += self.fused_durations[-1 - code]
                        free = begin + self.fused_durations[-1 - code]
                        self._finish_fused(-1 - code, free, ready)
                    ends.append(free)
                    continue
                break
            self.times.busy[rank] = busy

    def _finish_fused(self, index: int, end: float, ready: list[int]) -> None:
        """Notes when a fused unit ended."""
        for code in self.encoding.fused[index][0]:
            slot = code - self.shifts[code % len(self.shifts)]
            self._wake(slot, ready)
            self.finished[slot] = end

    def _wake(self, slot: int, ready: list[int]) -> None:
        """Lets the ranks go on that wait for a slot."""
        waiting = self.finished[slot]
        while waiting < -1:
            rank = int(-2 - waiting)
            ready.append(rank)
            waiting = self.next_waiting[rank]


def _fused_waits(encoding: Encoding, waits: Waits) -> Waits:
    """Returns the same for each fused unit, as distances from its (negative) code."""
    return [
        [
            (code + distance - (-1 - index), delay)
            for code in codes
            for distance, delay in waits[code % encoding.period]
        ]
        for index, (codes, _) in enumerate(encoding.fused)
    ]
