"""The ops of a plan as integers, so that its checks cost about a microsecond an op.

An op of micro-batch k has the code ``k * width + column``. With S stages and E edges between ranks
the columns are B, F, I, W and FREE of each stage, then SF, RF, SB and RB of each edge. What an op
needs is a fixed distance from its code. REDUCE and STEP, which end a row, have none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

from fleetpipe.schedules.action import Action, Fused
from fleetpipe.schedules.edges import Dependencies, Edge, crossing_edges, slice_before
from fleetpipe.schedules.operations import Free, Recv, Reduce, Send, Step
from fleetpipe.schedules.rows import PlanRows

_KINDS = "BFIW"
_WAYS = ("SF", "RF", "SB", "RB")

#: Where the columns of one class of op are: by kind, then by stage or edge.
_Table = dict[str, dict[Union[int, Edge], int]]


@dataclass
class PlanCodes:
    """The rows of a plan as integers.

    Args:
        rows: Codes of each rank's ops; ``-1 - i`` is the fused unit ``fused[i]``.
        fused: The codes in each fused unit.
        width: Distance between the codes of one op in consecutive micro-batches.
        peers: For each column the rank at the other end of a transfer; -1 for other ops.
        partners: For each column the distance to the code at the other end of a transfer.
        needs: For each column of each slice of a micro-batch (of which there is one where nothing
            is sliced) the distances to what has to stand before it on its rank.
        stages: Number of stages, S: the columns from ``4 * stages`` on are FREE.
    """

    rows: list[list[int]]
    fused: list[tuple[int, ...]]
    width: int
    peers: list[int]
    partners: list[int]
    needs: list[tuple[int, ...]]
    stages: int


class _Columns:
    """Which column is which."""

    def __init__(self, plan: PlanRows) -> None:
        self.plan = plan
        self.stages = plan.placement.stages
        self.leaving, self.entering = crossing_edges(plan.placement, plan.edges)
        self.edges = [edge for found in self.leaving for edge, _ in found]
        self.numbers = {edge: number for number, edge in enumerate(self.edges)}
        self.width = 5 * self.stages + 4 * len(self.edges)

    def of_stage(self, kind: str, stage: int) -> int:
        """Returns the column of B, F, I, W or FREE of a stage."""
        return (4 if kind == "FREE" else _KINDS.index(kind)) * self.stages + stage

    def of_edge(self, way: str, edge: Edge) -> int:
        """Returns the column of SF, RF, SB or RB of an edge between ranks."""
        return 5 * self.stages + _WAYS.index(way) * len(self.edges) + self.numbers[edge]

    def needs(self) -> list[tuple[int, ...]]:
        """Returns for each column the distances to what has to stand before it on its rank."""
        found: list[tuple[int, ...]] = [()] * self.width
        slices = self.plan.slices

        def note(column: int, *needed: int) -> None:
            found[column] = tuple(one - column for one in needed)

        rank_of = self.plan.placement.rank_of
        dependencies = Dependencies(self.plan.edges, self.stages)
        for stage in range(self.stages):
            arrivals = {
                "F": [self.of_edge("RF", edge) for edge, _ in self.entering[stage]],
                "B": [self.of_edge("RB", edge) for edge, _ in self.leaving[stage]],
            }
            for kind in _KINDS:
                near = [
                    self.of_stage("I" if other_kind == "B" else other_kind, other)
                    for other_kind, other in dependencies.of(kind, stage)
                    if rank_of(other) == rank_of(stage)
                ]
                way = "B" if kind == "I" else kind
                note(self.of_stage(kind, stage), *near, *arrivals.get(way, []))
            last = self.of_stage("F" if self.plan.forward_only else "W", stage)
            sent = [self.of_edge("SF", edge) for edge, _ in self.leaving[stage]]
            note(self.of_stage("FREE", stage), last, *sent)
        for edge in self.edges:
            note(self.of_edge("SF", edge), self.of_stage("F", edge.source))
            note(self.of_edge("SB", edge), self.of_stage("I", edge.target))
        needs = found * slices
        for index in range(slices):
            for kind in _KINDS:
                away = slice_before(kind, index, slices) * self.width
                done = (_KINDS.index("I") - _KINDS.index(kind)) * self.stages
                for column in range(self.of_stage(kind, 0), self.of_stage(kind, self.stages)):
                    if away:
                        other = away + (0 if kind == "F" else done)
                        needs[index * self.width + column] += (other,)
        return needs

    def transfers(self) -> tuple[list[int], list[int]]:
        """Returns for each column the rank at the other end, and the distance to its code."""
        peers, partners = [-1] * self.width, [0] * self.width
        for edge in self.edges:
            source, target = map(self.plan.placement.rank_of, edge[:2])
            for way, peer, other in (
                *(("SF", target, "RF"), ("RF", source, "SF")),
                *(("SB", source, "RB"), ("RB", target, "SB")),
            ):
                column = self.of_edge(way, edge)
                peers[column], partners[column] = peer, self.of_edge(other, edge) - column
        return peers, partners

    def of_rank(self, rank: int) -> tuple[_Table, _Table, _Table, dict[int, int]]:
        """Returns the columns that belong to a rank: of actions, sends, receives and releases."""
        own = self.plan.placement.stages_of(rank)
        out = [edge for stage in own for edge, _ in self.leaving[stage]]
        into = [edge for stage in own for edge, _ in self.entering[stage]]
        ends = {"SF": out, "RB": out, "SB": into, "RF": into}

        def of_edges(letter: str) -> _Table:
            return {
                kind: {edge: self.of_edge(letter + kind, edge) for edge in ends[letter + kind]}
                for kind in "FB"
            }

        actions: _Table = {
            kind: {stage: self.of_stage(kind, stage) for stage in own} for kind in _KINDS
        }
        frees = {stage: self.of_stage("FREE", stage) for stage in own}
        return actions, of_edges("S"), of_edges("R"), frees


def plan_codes(plan: PlanRows) -> PlanCodes | None:
    """Returns a plan as integers; None where an op does not belong on its rank.

    REDUCE and STEP belong at the end of a row, unless the plan is forward-only, and each once.
    """
    columns = _Columns(plan)
    peers, partners = columns.transfers()
    codes = PlanCodes([], [], columns.width, peers, partners, columns.needs(), columns.stages)
    for rank in range(plan.placement.ranks):
        try:
            row = _row(plan, rank, columns, codes.fused)
        except (KeyError, TypeError):
            return None
        if row is None:
            return None
        codes.rows.append(row)
    return codes


def _row(
    plan: PlanRows, rank: int, columns: _Columns, fused: list[tuple[int, ...]]
) -> list[int] | None:
    """Returns the codes of a rank's ops; raises KeyError for what is not of the rank."""
    actions, sends, receives, frees = columns.of_rank(rank)
    width, units = columns.width, plan.units
    ops = plan.ops[rank]
    if not plan.forward_only:
        if ops[-2:] != (Reduce(), Step()):
            return None
        ops = ops[:-2]
    row: list[int] = []
    for op in ops:
        if isinstance(op, Action):
            row.append(op[2] * width + actions[op[0]][op[1]])
        elif isinstance(op, Fused):
            unit = tuple(k * width + actions[kind][stage] for kind, stage, k in op.actions)
            fused.append(unit)
            row.append(-len(fused))
        elif isinstance(op, (Send, Recv, Free)):
            if isinstance(op, Free):
                k, column = op[1], frees[op[0]]
            else:
                k = op[2]
                column = (sends if isinstance(op, Send) else receives)[op[0]][op[1]]
            if not 0 <= k < units:
                return None
            row.append(k * width + column)
        else:
            return None
    return row
