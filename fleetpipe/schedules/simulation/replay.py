"""Computes when each action runs: each rank goes as far as its dependencies allow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import NamedTuple

from fleetpipe.schedules.action import KINDS, Action, flatten, parts
from fleetpipe.schedules.costs import Costs
from fleetpipe.schedules.edges import Dependencies, Edge, checked_edges, slice_before
from fleetpipe.schedules.explain import raise_incomplete, raise_stalled
from fleetpipe.schedules.rows import ScheduleRows


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
    # Costs of 1 and of 1.0 are equal, but times of one are whole numbers.
    key = checked_edges(edges, schedule.placement), repr(asdict(costs))
    kept: tuple[object, Replay] | None = vars(schedule).get("_replay")
    if kept is None:
        _require_complete(schedule)
    if kept is None or kept[0] != key:
        # Read back from the schedule, it might be another thread's.
        kept = key, _simulate(schedule, Dependencies(key[0], schedule.placement.stages), costs)
        vars(schedule)["_replay"] = kept
    return kept[1]


def _require_complete(schedule: ScheduleRows) -> None:
    """Refuses a schedule with an action that is missing, doubled, unknown, or on a wrong rank."""
    units, placement = schedule.units, schedule.placement
    # Counted first, since the sets below have every action that there should be.
    if sum(1 for row in schedule.actions for _ in flatten(row)) < placement.stages * units:
        raise_incomplete(schedule)
    for rank, row in enumerate(schedule.actions):
        needed = set(product(placement.stages_of(rank), range(units)))
        done: dict[str, set[tuple[int, int]]] = {kind: set() for kind in KINDS}
        actions = 0
        try:
            for kind, stage, micro_batch in flatten(row):
                done[kind].add((stage, micro_batch))
                actions += 1
        except (KeyError, TypeError):  # no such kind, or a number that is none
            raise_incomplete(schedule)
        backwards = set() if schedule.forward_only else needed
        complete = (
            done["F"] == needed
            and done["B"] | done["I"] == backwards
            and done["I"] == done["W"]
            and actions == len(needed) + len(backwards) + len(done["W"])
        )
        if not complete:
            raise_incomplete(schedule)


def _simulate(schedule: ScheduleRows, dependencies: Dependencies, costs: Costs) -> Replay:
    ranks = _Ranks(schedule, dependencies, costs)
    ranks.run()
    if any(len(ends) < len(row) for ends, row in zip(ranks.ends, schedule.actions)):
        raise_stalled(schedule, dependencies, list(map(len, ranks.ends)))
    return Replay(tuple(map(tuple, ranks.starts)), tuple(map(tuple, ranks.ends)), tuple(ranks.busy))


#: When an action of one kind and stage ended, by micro-batch; None before that.
_Ends = list[float | None]


class _Column(NamedTuple):
    """The actions of one kind and stage.

    Attributes:
        ends: When they ended. B and I share them: what waits for a gradient need not know which.
        duration: How long each takes.
        waits: What each waits for: its ends, the distance to its micro-batch or slice, and the
            latency of the value.
    """

    ends: _Ends
    duration: float
    waits: list[tuple[_Ends, int, float]]


class _Ranks:
    """The state of a replay: for each rank the times of the entries that it has run."""

    def __init__(self, schedule: ScheduleRows, dependencies: Dependencies, costs: Costs) -> None:
        ranks, stages = range(schedule.placement.ranks), range(schedule.placement.stages)
        self.schedule, self.costs = schedule, costs
        self.starts: list[list[float]] = [[] for _ in ranks]
        self.ends: list[list[float]] = [[] for _ in ranks]
        self.busy: list[float] = [0 for _ in ranks]
        ends: dict[str, list[_Ends]] = {
            kind: [[None] * schedule.units for _ in stages] for kind in "FBW"
        }
        ends["I"] = ends["B"]
        #: By slice, kind and stage.
        self.columns = [
            {
                kind: [
                    _Column(
                        ends[kind][stage],
                        of_slice.of(kind, stage),
                        _waits(schedule, dependencies, of_slice, ends, (kind, stage, index)),
                    )
                    for stage in stages
                ]
                for kind in KINDS
            }
            for index, of_slice in enumerate(costs.by_slice(schedule.slices))
        ]

    def run(self) -> None:
        """Runs every rank as far as possible."""
        ranks = [self._run(rank) for rank in range(len(self.ends))]
        before, done = -1, 0
        while done != before:
            for rank in ranks:
                next(rank, None)
            before, done = done, sum(map(len, self.ends))

    def _run(self, rank: int) -> Iterator[None]:
        """Runs a rank to its end, and yields whenever it has to wait."""
        slices, columns = self.schedule.slices, self.columns
        free: float = 0
        for item in self.schedule.actions[rank]:
            begin, duration = free, 0.0
            actions = parts(item)
            for kind, stage, number in actions:
                _, duration, waits = columns[number % slices][kind][stage]
                for ends, distance, latency in waits:
                    while (end := ends[number + distance]) is None:
                        yield
                    begin = max(begin, end + latency)
            if not isinstance(item, Action):
                duration = self.costs.of_fused(item)
            free = begin + duration
            for kind, stage, number in actions:
                columns[number % slices][kind][stage].ends[number] = free
            self.starts[rank].append(begin)
            self.ends[rank].append(free)
            self.busy[rank] += duration


def _waits(
    schedule: ScheduleRows,
    dependencies: Dependencies,
    costs: Costs,
    ends: dict[str, list[_Ends]],
    of: tuple[str, int, int],
) -> list[tuple[_Ends, int, float]]:
    """Returns what an action of a kind, a stage and the index of a slice waits for."""
    (kind, stage, index), rank_of = of, schedule.placement.rank_of
    waits = [
        # A value and its gradient take one edge, which the earlier stage names.
        (
            ends[other_kind][other],
            0,
            costs.comm_of(min(stage, other)) if rank_of(other) != rank_of(stage) else 0,
        )
        for other_kind, other in dependencies.of(kind, stage)
    ]
    away = slice_before(kind, index, schedule.slices)
    return [*waits, (ends[kind][stage], away, 0)] if away else waits
