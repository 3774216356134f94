"""Raises the error of a schedule that is incomplete, or that blocks when it is replayed.

The error of an incomplete schedule names an action that is missing, occurs twice or is on the wrong
rank. The error of a blocked one names an action that stands before its own input, or a cycle of
ranks that wait for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn

from fleetpipe.errors import FleetPipeError, ScheduleError
from fleetpipe.schedules.action import KINDS, Action, micro_batch_numbers, parts
from fleetpipe.schedules.placement import Dependencies, distance_to_slice_before
from fleetpipe.schedules.rows import ScheduleRows


def raise_incomplete(schedule: ScheduleRows) -> NoReturn:
    """Raises the ScheduleError that names a missing, repeated or misplaced action of a schedule."""
    positions: dict[Action, tuple[int, int]] = {}
    for action, rank, position in _actions_with_positions(schedule):
        _require_valid(schedule, action, rank, position)
        if action in positions:
            raise ScheduleError(
                f"{action} stands twice",
                where=describe_position(schedule, rank, position),
                expected=f"one {action}",
                got="the first is on rank {} at #{}".format(*positions[action]),
                fix="leave one of them out",
            )
        positions[action] = (rank, position)
    _check_kinds_of_backward(schedule, positions)
    raise _missing_error(schedule, positions)


def _actions_with_positions(schedule: ScheduleRows) -> Iterator[tuple[Action, int, int]]:
    """Yields each action of a schedule with its rank, and its position in the rank's row."""
    for rank, row in enumerate(schedule.actions):
        for position, item in enumerate(row):
            for action in parts(item):
                yield action, rank, position


def _require_valid(schedule: ScheduleRows, action: Action, rank: int, position: int) -> None:
    """Refuses an action of an unknown kind, stage or micro-batch, or of another rank's stage."""
    placement = schedule.placement
    kind, stage, micro_batch = action
    culprit = f"{kind}{stage}.{micro_batch}"
    here = describe_position(schedule, rank, position)
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
        last = micro_batch_numbers(schedule.micro_batches, schedule.slices)[-1]
        raise ScheduleError(
            f"{culprit} is of a micro-batch that does not exist",
            where=here,
            expected=f"a micro-batch in 0..{last}",
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


def _check_kinds_of_backward(
    schedule: ScheduleRows, positions: dict[Action, tuple[int, int]]
) -> None:
    """Refuses I or W beside B, and any backward in a forward-only schedule.

    ``positions`` has the rank of each action, and its position in the rank's row.
    """
    for action, position in positions.items():
        kind, stage, micro_batch = action
        whole = Action("B", stage, micro_batch)
        if kind in ("I", "W") and whole in positions:
            raise ScheduleError(
                f"{action} repeats a part of {whole}",
                where=describe_position(schedule, *position),
                expected=f"either {whole}, or I and W of the same stage and micro-batch",
                got=f"{whole} is on rank {positions[whole][0]} at #{positions[whole][1]}",
                fix=f"leave out {action}, or write I and W in place of {whole}",
            )
        if kind != "F" and schedule.forward_only:
            raise ScheduleError(
                f"{action} is a backward in a forward-only schedule",
                where=describe_position(schedule, *position),
                expected="forwards only",
                fix="leave it out",
            )


def _missing_error(
    schedule: ScheduleRows, positions: dict[Action, tuple[int, int]]
) -> FleetPipeError:
    """Returns the error that names the first action missing from ``positions``."""
    unit = "slice" if schedule.slices > 1 else "micro-batch"
    for micro_batch in micro_batch_numbers(schedule.micro_batches, schedule.slices):
        for stage in range(schedule.placement.stages):
            lacking = _find_missing_action(schedule, positions, stage, micro_batch)
            if lacking is not None:
                rank = schedule.placement.rank_of(stage)
                row = schedule.actions[rank]
                return ScheduleError(
                    f"{lacking} is missing",
                    where=f"rank {rank}, which has {len(row)} entries:"
                    f" {entries_around(row, len(row)) or 'none'}",
                    expected=f"for each stage and {unit} one F"
                    + ("" if schedule.forward_only else ", and one B or one I and one W"),
                    fix=f"add {lacking} to rank {rank}",
                )
    raise AssertionError("raise_incomplete was called for a complete schedule")


def _find_missing_action(
    schedule: ScheduleRows, positions: dict[Action, tuple[int, int]], stage: int, micro_batch: int
) -> Action | None:
    """Returns an action that a stage lacks for a micro-batch or slice; None if it has all."""
    present = {kind for kind in KINDS if Action(kind, stage, micro_batch) in positions}
    if "F" not in present:
        return Action("F", stage, micro_batch)
    if schedule.forward_only or "B" in present or {"I", "W"} <= present:
        return None
    missing_half = {"I": "W", "W": "I"}
    kind = next((missing_half[half] for half in "IW" if half in present), "B")
    return Action(kind, stage, micro_batch)


def entries_around(row: Sequence[object], position: int, reach: int = 3) -> str:
    """Writes the entries of a row near a position, for an error: ``... F0.2 >>F0.3<< B0.1 ...``.

    Args:
        row: The row of a rank.
        position: The position, counted from 0, of the entry to mark; the row's length marks none.
        reach: Entries to show on each side.
    """
    first, last = max(0, position - reach), min(len(row), position + reach + 1)
    shown = [str(entry) for entry in row[first:last]]
    if position < len(row):
        shown[position - first] = f">>{shown[position - first]}<<"
    before = ["..."] if first else []
    after = ["..."] if last < len(row) else []
    return " ".join(before + shown + after)


def describe_position(schedule: ScheduleRows, rank: int, position: int) -> str:
    """Writes where an entry of a schedule is, for an error: ``rank 1 at #17: .. >>B0.1<< ..``."""
    return f"rank {rank} at #{position}: {entries_around(schedule.actions[rank], position)}"


class _Position(NamedTuple):
    """A rank, and the position of an entry in its row."""

    rank: int
    position: int


class _Wait(NamedTuple):
    """The reason why a rank is blocked.

    Attributes:
        action: The action that the rank cannot run.
        needed: The action of which it needs the result.
        needed_at: The position of ``needed``, which has not run.
    """

    action: Action
    needed: Action
    needed_at: _Position


def raise_stalled(
    schedule: ScheduleRows, dependencies: Dependencies, reached: Sequence[int]
) -> NoReturn:
    """Raises the ScheduleError that says why a replay of a schedule is blocked.

    Args:
        schedule: A complete schedule.
        dependencies: The rule of what its actions wait for.
        reached: For each rank the position of the first entry that could not run.
    """
    entries_by_action = {
        (("B" if action.kind == "I" else action.kind), action.stage, action.micro_batch): (
            action,
            _Position(rank, position),
        )
        for action, rank, position in _actions_with_positions(schedule)
    }
    waits: dict[int, list[_Wait]] = {}
    for rank, row in enumerate(schedule.actions):
        for position in range(reached[rank], len(row)):
            for action in parts(row[position]):
                for needs in _needed_actions(action, dependencies, schedule.slices):
                    needed, at = entries_by_action[needs]
                    if at.rank == rank and at.position >= position:
                        _raise_wrong_order(schedule, action, needed, _Position(rank, position), at)
                    if position == reached[rank] and at.position >= reached[at.rank]:
                        waits.setdefault(rank, []).append(_Wait(action, needed, at))
    _raise_cycle(schedule, shortest_cycle(waits), reached)


def _needed_actions(
    action: Action, dependencies: Dependencies, slices: int
) -> Iterator[tuple[str, int, int]]:
    """Yields (kind, stage, number) of each action that an action waits for; "B" means B or I."""
    action_kind, stage, number = action
    for kind, other in dependencies.of(action_kind, stage):
        yield kind, other, number
    away = distance_to_slice_before(action_kind, number % slices, slices)
    if away:
        yield "B" if action_kind == "I" else action_kind, stage, number + away


def _raise_wrong_order(
    schedule: ScheduleRows, action: Action, needed: Action, at: _Position, needed_at: _Position
) -> NoReturn:
    """Raises the error of an action that stands before an action of its own rank that it needs."""
    if at == needed_at:
        raise ScheduleError(
            f"{action} is fused with {needed}, which it waits for",
            where=describe_position(schedule, *at),
            expected="fused actions that do not depend on each other",
            fix=f"write {needed} {action} without parentheses",
        )
    raise ScheduleError(
        f"{action} stands before {needed}, which it waits for",
        where=describe_position(schedule, *at),
        expected=f"{needed} earlier on rank {at.rank}",
        got=f"{needed} at #{needed_at.position}: "
        + entries_around(schedule.actions[needed_at.rank], needed_at.position),
        fix=f"put {needed} before {action}",
    )


def _raise_cycle(
    schedule: ScheduleRows, cycle: Sequence[tuple[int, _Wait]], reached: Sequence[int]
) -> NoReturn:
    """Raises the error of ranks that wait for each other, each for the next of ``cycle``."""
    lines = []
    for rank, wait in cycle:
        ahead = schedule.actions[wait.needed_at.rank][reached[wait.needed_at.rank]]
        behind = "" if wait.needed in parts(ahead) else f", behind {ahead}"
        lines.append(
            f"rank {rank} at #{reached[rank]} {wait.action} waits for {wait.needed},"
            f" which rank {wait.needed_at.rank} has at #{wait.needed_at.position}{behind}"
        )
    rows = [describe_position(schedule, rank, reached[rank]) for rank, _ in cycle]
    raise ScheduleError(
        f"deadlock: {len(cycle)} ranks wait for each other",
        where="\n    ".join(rows),
        expected="an order in which some rank can always go on",
        got="\n    ".join(lines),
        cause="the orders of these ranks contradict each other",
        fix="on one of these ranks, put what another waits for before the entry that waits",
    )


def shortest_cycle(waits: Mapping[int, Sequence[_Wait]]) -> list[tuple[int, _Wait]]:
    """Returns a shortest cycle of ranks that wait for each other, by a search from each rank.

    Args:
        waits: For each blocked rank the reasons why it is blocked.

    Returns:
        Each rank of the cycle with the reason that leads to the next rank; empty without a cycle.
    """
    best: list[tuple[int, _Wait]] = []
    for origin in waits:
        # For each rank found, the rank that waits for it, and why.
        came_from: dict[int, tuple[int, _Wait]] = {}
        queue = deque([origin])
        while queue and origin not in came_from:
            rank = queue.popleft()
            for wait in waits[rank]:
                if wait.needed_at.rank not in came_from:
                    came_from[wait.needed_at.rank] = (rank, wait)
                    queue.append(wait.needed_at.rank)
        if origin not in came_from:
            continue
        cycle = [came_from[origin]]
        while cycle[0][0] != origin:
            cycle.insert(0, came_from[cycle[0][0]])
        if not best or len(cycle) < len(best):
            best = cycle
    return best
