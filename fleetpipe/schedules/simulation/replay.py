"""Computes when each action runs: each rank goes as far as its dependencies allow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from fleetpipe.schedules.costs import Costs
from fleetpipe.schedules.edges import Dependencies, Edge, checked_edges
from fleetpipe.schedules.explain import raise_stalled
from fleetpipe.schedules.rows import ScheduleRows
from fleetpipe.schedules.simulation.encoding import COLUMNS, Encoding, Waits, encoding_of, waits_of


@dataclass(frozen=True)
class Replay:
    """The times at which each entry of each rank begins and ends.

    Args:
        starts: For each rank, the time at which each of its entries begins.
        ends: For each rank, the time at which each of its entries ends.
        busy: For each rank, the time that it computes in all.
    """

    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    busy: tuple[float, ...]


def replay(schedule: ScheduleRows, edges: Iterable[Edge] | None, costs: Costs) -> Replay:
    """Returns the times of all entries.

    Every rank runs its row in order; an entry begins when its rank is free and its inputs have
    arrived. The result does not depend on the order in which ranks are visited. The last result is
    cached with the schedule, since verify, simulate and lower all need it.

    Raises:
        ScheduleError: Ranks wait for each other, or for something later in their own row; or the
            schedule is incomplete.
    """
    stages = encoding_of(schedule).stages
    # Costs of 1 and of 1.0 are equal, but times of one are whole numbers.
    key = checked_edges(edges, schedule.placement), repr(asdict(costs))
    kept: tuple[object, Replay] | None = vars(schedule).get("_replay")
    if kept is None or kept[0] != key:
        # Read back from the schedule, it might be another thread's.
        kept = key, _simulate(schedule, Dependencies(key[0], stages), costs)
        vars(schedule)["_replay"] = kept
    return kept[1]


def _simulate(schedule: ScheduleRows, dependencies: Dependencies, costs: Costs) -> Replay:
    ranks = _Ranks(schedule, dependencies, costs)
    ranks.run()
    if any(len(ends) < len(row) for ends, row in zip(ranks.ends, schedule.actions)):
        raise_stalled(schedule, dependencies, list(map(len, ranks.ends)))
    return Replay(tuple(map(tuple, ranks.starts)), tuple(map(tuple, ranks.ends)), tuple(ranks.busy))


class _Ranks:
    """The state of a replay: when actions ended, and the slot that each blocked rank needs."""

    def __init__(self, schedule: ScheduleRows, dependencies: Dependencies, costs: Costs) -> None:
        self.encoding = encoding = encoding_of(schedule)
        ranks = range(schedule.placement.ranks)
        self.starts: list[list[float]] = [[] for _ in ranks]
        self.ends: list[list[float]] = [[] for _ in ranks]
        self.busy: list[float] = [0 for _ in ranks]
        # In the place of the time of a slot that is not finished: -1, or -2 - rank for the last of
        # the ranks that wait for it. The others are a linked list.
        self.finished: list[float] = [-1] * (encoding.width * schedule.units)
        self.next_waiting: list[float] = [-1 for _ in ranks]
        self.ready = list(ranks)
        waits = waits_of(schedule.placement, dependencies, costs, schedule.slices)
        durations = [
            of_slice.of(kind, stage)
            for of_slice in costs.by_slice(schedule.slices)
            for kind in COLUMNS
            for stage in range(encoding.stages)
        ]
        #: By column what an entry waits for, its duration, and the distance to its slot.
        self.columns = list(zip(waits, durations, encoding.shifts))
        self.units = _Units(encoding, waits, costs)

    def run(self) -> None:
        """Runs every rank as far as possible; a blocked rank is woken when its input is there."""
        ranks = [self._run(rank) for rank in self.ready]
        while self.ready:
            next(ranks[self.ready.pop()], None)

    def _run(self, rank: int) -> Iterator[None]:
        """Runs a rank to its end, and yields whenever it has to wait."""
        finished, columns, period = self.finished, self.columns, len(self.columns)
        begins, ends = self.starts[rank].append, self.ends[rank].append
        free: float = 0
        busy: float = 0
        for code in self.encoding.rows[rank]:
            if code >= 0:
                waits, duration, shift = columns[code % period]
                first = code
            else:
                waits, duration, first = self.units.of(-1 - code)
            begin = free
            for distance, delay in waits:
                arrival = finished[first + distance]
                if arrival < 0:
                    self.next_waiting[rank] = arrival
                    finished[first + distance] = -2 - rank
                    yield
                    arrival = finished[first + distance]
                if arrival + delay > begin:
                    begin = arrival + delay
            begins(begin)
            free = begin + duration
            ends(free)
            busy += duration
            if code >= 0:
                if finished[code - shift] < -1:
                    self._wake(code - shift)
                finished[code - shift] = free
            else:
                self._finish_fused(-1 - code, free)
        self.busy[rank] = busy

    def _finish_fused(self, index: int, end: float) -> None:
        """Records when a fused unit ended."""
        for code in self.encoding.fused[index][0]:
            slot = code - self.columns[code % len(self.columns)][2]
            self._wake(slot)
            self.finished[slot] = end

    def _wake(self, slot: int) -> None:
        """Resumes the ranks that wait for a slot."""
        waiting = self.finished[slot]
        while waiting < -1:
            rank = int(-2 - waiting)
            self.ready.append(rank)
            waiting = self.next_waiting[rank]


class _Units:
    """The dependencies of fused units, shared by units whose actions have the same distances."""

    def __init__(self, encoding: Encoding, waits: Waits, costs: Costs) -> None:
        self.encoding, self.waits, self.costs = encoding, waits, costs
        self.waits_by_columns: dict[tuple[int, ...], tuple[list[tuple[int, float]], float]] = {}

    def of(self, index: int) -> tuple[list[tuple[int, float]], float, int]:
        """Returns a unit's dependencies, its duration, and the code that distances start from."""
        codes, unit = self.encoding.fused[index]
        first, period = codes[0], len(self.waits)
        alike = (first % period, *(code - first for code in codes))
        if alike not in self.waits_by_columns:
            waits = [
                (code + distance - first, delay)
                for code in codes
                for distance, delay in self.waits[code % period]
            ]
            self.waits_by_columns[alike] = waits, self.costs.of_fused(unit)
        return *self.waits_by_columns[alike], first
