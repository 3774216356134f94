"""Actions as integers, so that verify, simulate and lowering cost about a microsecond an action.

With S stages, the action (kind, stage, k) has the code ``k * 4S + column`` where ``column`` is
``offset[kind] + stage``, the offsets of F, I, W and B being 0, S, 2S and 3S. The codes of one
micro-batch stand together, so a dependency is a fixed distance. B shares the *slot* of I: whoever
waits for a stage's gradient need not know which it is. A search orders F, I and W by these codes.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleetpipe.schedules.action import Action, Fused, parts
from fleetpipe.schedules.costs import Costs
from fleetpipe.schedules.edges import Dependencies, slice_before
from fleetpipe.schedules.explain.completeness import raise_incomplete
from fleetpipe.schedules.placement import Placement
from fleetpipe.schedules.rows import ScheduleRows

#: Kinds in the order of their columns, S of each.
COLUMNS = "FIWB"

_MARK = {"F": 1, "I": 2, "W": 3, "B": 4}

#: For each column what its action waits for: (distance to that slot, latency of the value).
Waits = list[list[tuple[int, float]]]


@dataclass
class Encoding:
    """The rows of a schedule as integers.

    Args:
        stages: Number of stages, S.
        rows: Codes of each rank's entries; ``-1 - i`` is the fused unit ``fused[i]``.
        fused: The codes in each fused unit, with the unit itself.
        slices: Slices of a micro-batch. Each counts as a micro-batch does, and what an action
            waits for depends on which slice it is of.
    """

    stages: int
    rows: list[list[int]]
    fused: list[tuple[tuple[int, ...], Fused]]
    slices: int = 1

    @property
    def width(self) -> int:
        """Distance between the codes of one action in consecutive micro-batches or slices, 4S."""
        return 4 * self.stages

    @property
    def period(self) -> int:
        """The columns of all slices of a micro-batch: what a code stands for, it is modulo this."""
        return self.width * self.slices

    @property
    def shifts(self) -> list[int]:
        """For each column the distance from a code to its slot: 0, or from B to I."""
        return ([0] * (3 * self.stages) + [2 * self.stages] * self.stages) * self.slices


def column(kind: str, stage: int, stages: int) -> int:
    """Returns the column of a kind and stage."""
    return COLUMNS.index(kind) * stages + stage


def slot_column(kind: str, stage: int, stages: int) -> int:
    """Returns the column where the end of a kind and stage is noted: that of B is I's."""
    return column("I" if kind == "B" else kind, stage, stages)


def waits_of(
    placement: Placement, dependencies: Dependencies, costs: Costs, slices: int = 1
) -> Waits:
    """Returns for each column the distances to what it waits for, with their latencies."""
    by_slice = costs.by_slice(slices)
    stages = placement.stages
    waits = []
    for index in range(slices):
        for kind in COLUMNS:
            for stage in range(stages):
                own = column(kind, stage, stages)
                found = [
                    (
                        slot_column(other_kind, other, stages) - own,
                        # A value and its gradient take one edge, which the earlier stage names.
                        by_slice[index].comm_of(min(stage, other))
                        if placement.rank_of(other) != placement.rank_of(stage)
                        else 0,
                    )
                    for other_kind, other in dependencies.of(kind, stage)
                ]
                away = slice_before(kind, index, slices)
                if away:
                    same = slot_column(kind, stage, stages) - own
                    found.append((same + away * 4 * stages, 0))
                waits.append(found)
    return waits


def encoding_of(schedule: ScheduleRows) -> Encoding:
    """Returns the schedule as integers, having checked that it is complete.

    It is made once and kept with the schedule, as a cached property would be.

    Raises:
        ScheduleError: An action is missing, doubled, unknown, or on the wrong rank.
    """
    kept = vars(schedule)
    if "_encoding" not in kept:
        kept["_encoding"] = _encode(schedule)
    encoding: Encoding = kept["_encoding"]
    return encoding


def _encode(schedule: ScheduleRows) -> Encoding:
    stages, needed = schedule.placement.stages, schedule.placement.stages * schedule.units
    # Counted first, since the table of marks has a byte for every action that there should be.
    if sum(map(len, schedule.actions)) < needed and _count(schedule) < needed:
        raise_incomplete(schedule)
    encoding = Encoding(stages, [], [], schedule.slices)
    marks = bytearray(encoding.width * schedule.units)
    for rank in range(schedule.placement.ranks):
        _encode_row(schedule, rank, encoding, marks)
    whole, split, weights = (marks.count(_MARK[kind]) for kind in "BIW")
    if marks.count(_MARK["F"]) != needed or split != weights:
        raise_incomplete(schedule)
    if whole + split != (0 if schedule.forward_only else needed):
        raise_incomplete(schedule)
    # As many I as W: each W must stand for a backward that is not whole.
    if weights and any(
        marks[code - stages] != _MARK["I"]
        for code in range(len(marks))
        if marks[code] == _MARK["W"]
    ):
        raise_incomplete(schedule)
    return encoding


def _encode_row(schedule: ScheduleRows, rank: int, encoding: Encoding, marks: bytearray) -> None:
    """Adds a rank's row to the encoding, and marks the slot of each of its actions."""
    columns = _columns(schedule, rank)
    width, micro_batches = encoding.width, schedule.units
    codes: list[int] = []
    encoding.rows.append(codes)
    for item in schedule.actions[rank]:
        first = len(codes)
        for action in (item,) if isinstance(item, Action) else item.actions:
            kind, stage, micro_batch = action
            try:
                place, shift, mark = columns[kind][stage]
                code = micro_batch * width + place
                if not 0 <= micro_batch < micro_batches or marks[code - shift]:
                    raise_incomplete(schedule)
            except (KeyError, TypeError):
                raise_incomplete(schedule)
            marks[code - shift] = mark
            codes.append(code)
        if isinstance(item, Fused):
            encoding.fused.append((tuple(codes[first:]), item))
            codes[first:] = [-len(encoding.fused)]


def _columns(schedule: ScheduleRows, rank: int) -> dict[str, dict[int, tuple[int, int, int]]]:
    """Returns column, distance to the slot, and mark of each kind and stage on ``rank``."""
    stages = schedule.placement.stages
    return {
        kind: {
            stage: (column(kind, stage, stages), 2 * stages if kind == "B" else 0, mark)
            for stage in schedule.placement.stages_of(rank)
        }
        for kind, mark in _MARK.items()
    }


def _count(schedule: ScheduleRows) -> int:
    return sum(len(parts(item)) for row in schedule.actions for item in row)
