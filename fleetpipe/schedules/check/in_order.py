"""Reads a plan once, as integers: is each op on its rank, there once, and after what it needs?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleetpipe.schedules.action import Action, Fused
from fleetpipe.schedules.check.plan_columns import PlanColumns, Table
from fleetpipe.schedules.operations import Free, Op, Reduce, Step
from fleetpipe.schedules.rows import PlanRows


def transfers_in_order(plan: PlanRows, columns: PlanColumns) -> list[list[int]] | None:
    """Returns the codes of each rank's sends and receives; None where something is out of order.

    Else the computations are complete, each op is on its rank, once, after what it needs there,
    all activations are released, and REDUCE and STEP end each row, unless it is forward-only.
    """
    reader = _Reader(plan, columns)
    rows = []
    for rank in range(plan.placement.ranks):
        try:
            row = reader.read(rank)
        except (KeyError, TypeError, IndexError):
            # No such op on this rank, or no such micro-batch.
            return None
        if row is None:
            return None
        rows.append(row)
    return rows if reader.is_complete() else None


class _Reader:
    """What was read so far: a mark for the code of each op, and for a B those of I and W too."""

    def __init__(self, plan: PlanRows, columns: PlanColumns) -> None:
        self.plan, self.columns = plan, columns
        self.needs = columns.needs()
        self.marks = bytearray(columns.width * plan.units)

    def read(self, rank: int) -> list[int] | None:
        """Returns the codes of a rank's transfers; None, or an error, where one is out of order."""
        columns, needs, marks = self.columns, self.needs, self.marks
        width, period, first_transfer = columns.width, len(needs), columns.first_transfer
        # B, which comes first among the columns, is I and W as well.
        stages, to_input, to_weight = columns.stages, 2 * columns.stages, 3 * columns.stages
        tables, frees = columns.of_rank(rank)
        ops = self._opened(self.plan.ops[rank], tables[Action])
        if ops is None:
            return None
        transfers: list[int] = []
        for op in ops:
            if type(op) is Free:
                k, column = op[1], frees[op[0]]
            else:
                k, column = op[2], tables[type(op)][op[0]][op[1]]
            code = k * width + column
            for distance in needs[code % period]:
                if not marks[code + distance]:
                    return None
            if marks[code] or k < 0:
                return None
            marks[code] = 1
            if column >= first_transfer:
                transfers.append(code)
            elif column < stages:
                if marks[code + to_input] or marks[code + to_weight]:
                    return None
                marks[code + to_input] = marks[code + to_weight] = 1
        return transfers

    def _opened(self, ops: Sequence[Op], table: Table) -> Sequence[Any] | None:
        """Returns a rank's ops up to REDUCE and STEP, fused units opened; None where one waits."""
        if not self.plan.forward_only:
            if ops[-2:] != (Reduce(), Step()):
                return None
            ops = ops[:-2]
        if Fused not in set(map(type, ops)):
            return ops
        opened: list[Op] = []
        for op in ops:
            if not isinstance(op, Fused):
                opened.append(op)
            elif self._waits_for_itself(op, table):
                return None
            else:
                opened += op.actions
        return opened

    def _waits_for_itself(self, unit: Fused, table: Table) -> bool:
        """Whether an action of a fused unit waits for another of them."""
        width, stages = self.columns.width, self.columns.stages
        codes = [k * width + table[kind][stage] for kind, stage, k in unit.actions]
        done = {*codes, *(code + 2 * stages for code in codes if code % width < stages)}
        return any(
            code + distance in done
            for code in codes
            for distance in self.needs[code % len(self.needs)]
        )

    def is_complete(self) -> bool:
        """Whether all computations and releases were read; no more than these can have been."""
        stages, units = self.columns.stages, self.plan.units
        gradients = 0 if self.plan.forward_only else units
        wanted = [units] * stages + [gradients] * (2 * stages) + [units] * stages
        return wanted == [
            self.marks[column :: self.columns.width].count(1)
            for column in range(stages, 5 * stages)
        ]
