"""Names what makes a replay stand still: an action before its own input, or a cycle of ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn

from fleetpipe.errors import ScheduleError
from fleetpipe.schedules.action import Action, parts
from fleetpipe.schedules.edges import Dependencies, slice_before
from fleetpipe.schedules.explain.window import where
from fleetpipe.schedules.rows import ScheduleRows


class _Place(NamedTuple):
    rank: int
    position: int


class _Wait(NamedTuple):
    """The action that a rank stands at waits for ``needed``, which is at ``place``."""

    action: Action
    needed: Action
    place: _Place


def raise_stalled(
    schedule: ScheduleRows, dependencies: Dependencies, reached: Sequence[int]
) -> NoReturn:
    """Raises the ScheduleError of a schedule in which rank r got no further than ``reached[r]``."""
    places = {
        (("B" if action.kind == "I" else action.kind), action.stage, action.micro_batch): (
            action,
            _Place(rank, position),
        )
        for rank, row in enumerate(schedule.actions)
        for position, item in enumerate(row)
        for action in parts(item)
    }
    waits: dict[int, list[_Wait]] = {}
    for rank, row in enumerate(schedule.actions):
        for position in range(reached[rank], len(row)):
            for action in parts(row[position]):
                for needs in _needs(action, dependencies, schedule.slices):
                    needed, place = places[needs]
                    if place.rank == rank and place.position >= position:
                        _raise_out_of_order(schedule, action, needed, _Place(rank, position), place)
                    if position == reached[rank] and place.position >= reached[place.rank]:
                        waits.setdefault(rank, []).append(_Wait(action, needed, place))
    _raise_cycle(schedule, shortest_cycle(waits), reached)


def _needs(
    action: Action, dependencies: Dependencies, slices: int
) -> Iterator[tuple[str, int, int]]:
    """Yields what an action waits for; "B" stands for I as well."""
    action_kind, stage, number = action
    for kind, other in dependencies.of(action_kind, stage):
        yield kind, other, number
    away = slice_before(action_kind, number % slices, slices)
    if away:
        yield "B" if action_kind == "I" else action_kind, stage, number + away


def _raise_out_of_order(
    schedule: ScheduleRows, action: Action, needed: Action, at: _Place, place: _Place
) -> NoReturn:
    if at == place:
        raise ScheduleError(
            f"{action} is fused with {needed}, which it waits for",
            where=where(schedule, *at),
            expected="fused actions that do not depend on each other",
            fix=f"write {needed} {action} without parentheses",
        )
    raise ScheduleError(
        f"{action} stands before {needed}, which it waits for",
        where=where(schedule, *at),
        expected=f"{needed} earlier on rank {at.rank}",
        got=f"{needed} at #{place.position}: " + where(schedule, *place).partition(": ")[2],
        fix=f"put {needed} before {action}",
    )


def _raise_cycle(
    schedule: ScheduleRows, cycle: Sequence[tuple[int, _Wait]], reached: Sequence[int]
) -> NoReturn:
    lines = []
    for rank, wait in cycle:
        ahead = schedule.actions[wait.place.rank][reached[wait.place.rank]]
        behind = "" if wait.needed in parts(ahead) else f", behind {ahead}"
        lines.append(
            f"rank {rank} at #{reached[rank]} {wait.action} waits for {wait.needed},"
            f" which rank {wait.place.rank} has at #{wait.place.position}{behind}"
        )
    rows = [where(schedule, rank, reached[rank]) for rank, _ in cycle]
    raise ScheduleError(
        f"deadlock: {len(cycle)} ranks wait for each other",
        where="\n    ".join(rows),
        expected="an order in which some rank can always go on",
        got="\n    ".join(lines),
        cause="the orders of these ranks contradict each other",
        fix="on one of these ranks, put what another waits for before the entry that waits",
    )


def shortest_cycle(waits: Mapping[int, Sequence[_Wait]]) -> list[tuple[int, _Wait]]:
    """Returns a shortest cycle of ranks, each with its wait for the next one of the cycle."""
    best: list[tuple[int, _Wait]] = []
    for origin in waits:
        came: dict[int, tuple[int, _Wait]] = {}
        queue = deque([origin])
        while queue and origin not in came:
            rank = queue.popleft()
            for wait in waits[rank]:
                if wait.place.rank not in came:
                    came[wait.place.rank] = (rank, wait)
                    queue.append(wait.place.rank)
        if origin not in came:
            continue
        cycle = [came[origin]]
        while cycle[0][0] != origin:
            cycle.insert(0, came[cycle[0][0]])
        if not best or len(cycle) < len(best):
            best = cycle
    return best
