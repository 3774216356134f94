"""Names the action that a schedule lacks, has twice, or has where it does not belong."""

from __future__ import annotations

from typing import NoReturn

from fleetpipe.errors import FleetPipeError, ScheduleError
from fleetpipe.schedules.action import KINDS, Action, numbers, parts
from fleetpipe.schedules.explain.window import where, window
from fleetpipe.schedules.rows import ScheduleRows


def raise_incomplete(schedule: ScheduleRows) -> NoReturn:
    """Raises the ScheduleError of a schedule whose multiset of actions is wrong."""
    positions: dict[Action, tuple[int, int]] = {}
    for rank, row in enumerate(schedule.actions):
        for position, item in enumerate(row):
            for action in parts(item):
                _check_place(schedule, action, rank, position)
                if action in positions:
                    raise _doubled(schedule, action, positions[action], (rank, position))
                positions[action] = (rank, position)
    _check_backwards(schedule, positions)
    raise _missing(schedule, positions)


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


def _doubled(
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
    for action, place in positions.items():
        kind, stage, micro_batch = action
        whole = Action("B", stage, micro_batch)
        if kind in ("I", "W") and whole in positions:
            raise ScheduleError(
                f"{action} repeats a part of {whole}",
                where=where(schedule, *place),
                expected=f"either {whole}, or I and W of the same stage and micro-batch",
                got=f"{whole} is on rank {positions[whole][0]} at #{positions[whole][1]}",
                fix=f"leave out {action}, or write I and W in place of {whole}",
            )
        if kind != "F" and schedule.forward_only:
            raise ScheduleError(
                f"{action} is a backward in a forward-only schedule",
                where=where(schedule, *place),
                expected="forwards only",
                fix="leave it out",
            )


def _missing(schedule: ScheduleRows, positions: dict[Action, tuple[int, int]]) -> FleetPipeError:
    unit = "slice" if schedule.slices > 1 else "micro-batch"
    for micro_batch in numbers(schedule.micro_batches, schedule.slices):
        for stage in range(schedule.placement.stages):
            lacking = _lacking(schedule, positions, stage, micro_batch)
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


def _lacking(
    schedule: ScheduleRows, positions: dict[Action, tuple[int, int]], stage: int, micro_batch: int
) -> Action | None:
    have = {kind for kind in KINDS if Action(kind, stage, micro_batch) in positions}
    if "F" not in have:
        return Action("F", stage, micro_batch)
    if schedule.forward_only or "B" in have or {"I", "W"} <= have:
        return None
    kind = "W" if "I" in have else "I" if "W" in have else "B"
    return Action(kind, stage, micro_batch)
