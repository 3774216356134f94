"""Raises the error of a schedule that is incomplete or deadlocks.

The error names an action that is missing, occurs twice or is on the wrong rank, or the reason why a
replay is stuck: an action before its own input, or a cycle of ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn

from fleetpipe.errors import FleetPipeError, ScheduleError
from fleetpipe.schedules.action import KINDS, Action, numbers, parts
from fleetpipe.schedules.placement import Dependencies, slice_before
from fleetpipe.schedules.rows import ScheduleRows


def raise_incomplete(schedule: ScheduleRows) -> NoReturn:
    """Raises the ScheduleError of a schedule with missing, doubled or misplaced actions."""
    positions: dict[Action, tuple[int, int]] = {}
    for rank, row in enumerate(schedule.actions):
        for position, item in enumerate(row):
            for action in parts(item):
                _check_place(schedule, action, rank, position)
                if action in positions:
                    raise _doubled_error(schedule, action, positions[action], (rank, position))
                positions[action] = (rank, position)
    _check_backwards(schedule, positions)
    raise _missing_error(schedule, positions)


def _check_place(schedule: ScheduleRows, action: Action, rank: int, position: int) -> None:
    placement = schedule.placement
    kind, stage, micro_batch = action
    culprit = f"{kind}{stage}.{micro_batch}"
    here = where(schedule, rank, position)
    if kind not in KINDS:
        raise ScheduleError(
            f"{culprit} has the unknown kind {kind!r}",
            where=here,
            expected="one of F, B, I, W",
            fix="write F for a forward, B for a backward, or I and W for its two halves",
        )
    if not isinstance(stage, int) or not 0 <= stage < placement.stages:
        raise ScheduleError(
            f"{culprit} is of a stage that does not exist",
            where=here,
            expected=f"a stage in 0..{placement.stages - 1}",
            fix="leave it out, or give the placement more ranks or chunks",
        )
    if not isinstance(micro_batch, int) or not 0 <= micro_batch < schedule.units:
        raise ScheduleError(
            f"{culprit} is of a micro-batch that does not exist",
            where=here,
            expected=f"a micro-batch in 0..{numbers(schedule.micro_batches, schedule.slices)[-1]}",
            fix="leave it out, or raise the number of micro-batches",
        )
    if placement.rank_of(stage) != rank:
        raise ScheduleError(
            f"{culprit} is on the wrong rank",
            where=here,
            expected=f"rank {placement.rank_of(stage)}, which owns stage {stage}"
            f" (placement {placement.name})",
            fix=f"move it to rank {placement.rank_of(stage)}",
        )


def _doubled_error(
    schedule: ScheduleRows, action: Action, first: tuple[int, int], second: tuple[int, int]
) -> FleetPipeError:
    return ScheduleError(
        f"{action} stands twice",
        where=where(schedule, *second),
        expected=f"one {action}",
        got=f"the first is on rank {first[0]} at #{first[1]}",
        fix="leave one of them out",
    )


def _check_backwards(schedule: ScheduleRows, positions: dict[Action, tuple[int, int]]) -> None:
    for action, position in positions.items():
        kind, stage, micro_batch = action
        whole = Action("B", stage, micro_batch)
        if kind in ("I", "W") and whole in positions:
            raise ScheduleError(
                f"{action} repeats a part of {whole}",
                where=where(schedule, *position),
                expected=f"either {whole}, or I and W of the same stage and micro-batch",
                got=f"{whole} is on rank {positions[whole][0]} at #{positions[whole][1]}",
                fix=f"leave out {action}, or write I and W in place of {whole}",
            )
        if kind != "F" and schedule.forward_only:
            raise ScheduleError(
                f"{action} is a backward in a forward-only schedule",
                where=where(schedule, *position),
                expected="forwards only",
                fix="leave it out",
            )


def _missing_error(
    schedule: ScheduleRows, positions: dict[Action, tuple[int, int]]
) -> FleetPipeError:
    unit = "slice" if schedule.slices > 1 else "micro-batch"
    for micro_batch in numbers(schedule.micro_batches, schedule.slices):
        for stage in range(schedule.placement.stages):
            lacking = _first_missing(schedule, positions, stage, micro_batch)
            if lacking is not None:
                rank = schedule.placement.rank_of(stage)
                row = schedule.actions[rank]
                return ScheduleError(
                    f"{lacking} is missing",
                    where=f"rank {rank}, which has {len(row)} entries:"
                    f" {window(row, len(row)) or 'none'}",
                    expected=f"for each stage and {unit} one F"
                    + ("" if schedule.forward_only else ", and one B or one I and one W"),
                    fix=f"add {lacking} to rank {rank}",
                )
    raise AssertionError("raise_incomplete was called for a complete schedule")


def _first_missing(
    schedule: ScheduleRows, positions: dict[Action, tuple[int, int]], stage: int, micro_batch: int
) -> Action | None:
    have = {kind for kind in KINDS if Action(kind, stage, micro_batch) in positions}
    if "F" not in have:
        return Action("F", stage, micro_batch)
    if schedule.forward_only or "B" in have or {"I", "W"} <= have:
        return None
    kind = "W" if "I" in have else "I" if "W" in have else "B"
    return Action(kind, stage, micro_batch)


def window(row: Sequence[object], position: int, reach: int = 3) -> str:
    """Returns the entries of a row around ``position``, with that one marked ``>>F0.3<<``."""
    first, last = max(0, position - reach), min(len(row), position + reach + 1)
    shown = [str(entry) for entry in row[first:last]]
    if position < len(row):
        shown[position - first] = f">>{shown[position - first]}<<"
    before = ["..."] if first else []
    after = ["..."] if last < len(row) else []
    return " ".join(before + shown + after)


def where(schedule: ScheduleRows, rank: int, position: int) -> str:
    """Returns "rank 1 at #17: ..F0.2 >>B0.1<< F0.3.." for an error."""
    return f"rank {rank} at #{position}: {window(schedule.actions[rank], position)}"


class _Place(NamedTuple):
    rank: int
    position: int


class _Wait(NamedTuple):
    """A rank is stuck at an action that waits for ``needed``, which is at ``place``."""

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
    """Yields the actions that an action waits for; "B" stands for I as well."""
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
    """Returns a shortest cycle of ranks, each with its wait for the next rank of the cycle."""
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
