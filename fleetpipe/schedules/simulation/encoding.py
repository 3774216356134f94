"""Actions as integers, so that verify, simulate and lowering cost about a microsecond an action.

With S stages, the action (kind, stage, k) has the code ``k * 4S + column`` where ``column`` is
``offset[kind] + stage``, the offsets of F, I, W and B being 0, S, 2S and 3S. The codes of one
micro-batch are adjacent, so a dependency is a fixed distance. B shares the *slot* of I: an action
that waits for a stage's gradient need not know which of them it is. A search orders F, I and W by
these codes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import cast

from fleetpipe.schedules.action import Action, Fused, Item, flatten, parts
from fleetpipe.schedules.costs import Costs
from fleetpipe.schedules.edges import Dependencies, slice_before
from fleetpipe.schedules.explain import raise_incomplete
from fleetpipe.schedules.placement import Placement
from fleetpipe.schedules.rows import ScheduleRows

#: Kinds in the order of their columns, S of each.
COLUMNS = "FIWB"

_MARK = {"F": 1, "I": 2, "W": 3, "B": 4}

#: From the marks in the slots of I, which are of I and of B, to those that W must have.
_TO_WEIGHTS = bytes.maketrans(bytes([_MARK["I"], _MARK["B"]]), bytes([_MARK["W"], 0]))

#: For each column what its action waits for: (distance to that slot, latency of the value).
Waits = list[list[tuple[int, float]]]


@dataclass
class Encoding:
    """The rows of a schedule as integers.

    Args:
        stages: Number of stages, S.
        rows: Codes of each rank's entries; ``-1 - i`` is the fused unit ``fused[i]``.
        fused: The codes in each fused unit, with the unit itself.
        slices: Slices of a micro-batch. Each is numbered like a micro-batch, and what an action
            waits for depends on its slice.
    """

    stages: int
    rows: list[list[int]]
    fused: list[tuple[tuple[int, ...], Fused]]
    slices: int = 1

    @property
    def width(self) -> int:
        """Distance between the codes of one action in successive micro-batches or slices, 4S."""
        return 4 * self.stages

    @property
    def shifts(self) -> list[int]:
        """For each column the distance from a code to its slot: 0, or from B to I."""
        return ([0] * (3 * self.stages) + [2 * self.stages] * self.stages) * self.slices


def column(kind: str, stage: int, stages: int) -> int:
    """Returns the column of a kind and stage."""
    return COLUMNS.index(kind) * stages + stage


def slot_column(kind: str, stage: int, stages: int) -> int:
    """Returns the column for the end of a kind and stage: B shares that of I."""
    return column("I" if kind == "B" else kind, stage, stages)


def waits_of(
    placement: Placement, dependencies: Dependencies, costs: Costs, slices: int = 1
) -> Waits:
    """Returns for each column the distances to the actions it waits for, with their latencies."""
    by_slice = costs.by_slice(slices)
    stages = placement.stages
    waits = []
    for index in range(slices):
        for kind in COLUMNS:
            for stage in range(stages):
                own_column = column(kind, stage, stages)
                distances = [
                    (
                        slot_column(other_kind, other, stages) - own_column,
                        # A value and its gradient take one edge, which the earlier stage names.
                        by_slice[index].comm_of(min(stage, other))
                        if placement.rank_of(other) != placement.rank_of(stage)
                        else 0,
                    )
                    for other_kind, other in dependencies.of(kind, stage)
                ]
                away = slice_before(kind, index, slices)
                if away:
                    same = slot_column(kind, stage, stages) - own_column
                    distances.append((same + away * 4 * stages, 0))
                waits.append(distances)
    return waits


def encoding_of(schedule: ScheduleRows) -> Encoding:
    """Returns the schedule as integers, after checking that it is complete.

    It is computed once and cached with the schedule.

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
    whole, split = marks.count(_MARK["B"]), marks.count(_MARK["I"])
    if marks.count(_MARK["F"]) != needed:
        raise_incomplete(schedule)
    if whole + split != (0 if schedule.forward_only else needed):
        raise_incomplete(schedule)
    for stage in range(stages):
        gradients, weights = (marks[column(kind, stage, stages) :: encoding.width] for kind in "IW")
        if gradients.translate(_TO_WEIGHTS) != weights:
            raise_incomplete(schedule)
    return encoding


def _encode_row(schedule: ScheduleRows, rank: int, encoding: Encoding, marks: bytearray) -> None:
    """Adds a rank's row to the encoding, and marks the slot of each of its actions."""
    row, columns, width = schedule.actions[rank], _columns(schedule, rank), encoding.width
    whole = set(map(type, row)) <= {Action}
    actions = cast("Iterable[Action]", row) if whole else flatten(row)
    codes: list[int] = []
    try:
        for kind, stage, micro_batch in actions:
            place, shift, mark = columns[kind][stage]
            code = micro_batch * width + place
            if marks[code - shift] or micro_batch < 0:
                raise_incomplete(schedule)
            marks[code - shift] = mark
            codes.append(code)
    except (KeyError, TypeError, IndexError):
        # No such kind, no such stage on this rank, or no such micro-batch.
        raise_incomplete(schedule)
    encoding.rows.append(codes if whole else _entry_codes(row, codes, encoding))


def _entry_codes(row: Sequence[Item], codes: Iterable[int], encoding: Encoding) -> list[int]:
    """Returns the codes of a row's entries from those of its actions."""
    each = iter(codes)
    row_codes = []
    for item in row:
        if isinstance(item, Fused):
            encoding.fused.append((tuple(islice(each, len(item.actions))), item))
            row_codes.append(-len(encoding.fused))
        else:
            row_codes.append(next(each))
    return row_codes


def _columns(schedule: ScheduleRows, rank: int) -> dict[str, dict[int, tuple[int, int, int]]]:
    """Returns column, distance to the slot, and mark for each kind and stage on ``rank``."""
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
