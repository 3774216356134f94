"""The ops of a plan as integers, so that its checks cost less than a microsecond an op.

An op of micro-batch k has the code ``k * width + column``. With S stages and E edges between ranks
the columns are B, F, I, W and FREE of each stage, then SF, RF, SB and RB of each edge. What an op
needs is a fixed distance from its code. REDUCE and STEP, which end a row, have none.
"""

from __future__ import annotations

from fleetpipe.schedules.action import Action
from fleetpipe.schedules.edges import Dependencies, Edge, crossing_edges, slice_before
from fleetpipe.schedules.plan_ops import Recv, Send
from fleetpipe.schedules.rows import PlanRows

_KINDS = "BFIW"
_WAYS = ("SF", "RF", "SB", "RB")

#: Where the columns of one class of op are: by kind, then by stage or edge.
Table = dict[str, dict[int | Edge, int]]


class PlanColumns:
    """The numbering of the columns for the ops of one plan."""

    def __init__(self, plan: PlanRows) -> None:
        self.plan = plan
        self.stages = plan.placement.stages
        self.leaving, self.entering = crossing_edges(plan.placement, plan.edges)
        self.edges = [edge for leaving in self.leaving for edge, _ in leaving]
        self.numbers = {edge: number for number, edge in enumerate(self.edges)}
        self.width = 5 * self.stages + 4 * len(self.edges)

    def of_stage(self, kind: str, stage: int) -> int:
        """Returns the column of B, F, I, W or FREE of a stage."""
        return (4 if kind == "FREE" else _KINDS.index(kind)) * self.stages + stage

    def of_edge(self, way: str, edge: Edge) -> int:
        """Returns the column of SF, RF, SB or RB of an edge between ranks."""
        return self.first_transfer + _WAYS.index(way) * len(self.edges) + self.numbers[edge]

    def needs(self) -> list[tuple[int, ...]]:
        """Returns the distances from an op to the ops that must precede it on its rank.

        By column, once for each slice of a micro-batch (once if nothing is sliced).
        """
        distances: list[tuple[int, ...]] = [()] * self.width
        slices = self.plan.slices

        def note(column: int, *needed: int) -> None:
            distances[column] = tuple(one - column for one in needed)

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
        needs = distances * slices
        for index in range(slices):
            for kind in _KINDS:
                away = slice_before(kind, index, slices) * self.width
                done = (_KINDS.index("I") - _KINDS.index(kind)) * self.stages
                for column in range(self.of_stage(kind, 0), self.of_stage(kind, self.stages)):
                    if away:
                        other = away + (0 if kind == "F" else done)
                        needs[index * self.width + column] += (other,)
        return needs

    @property
    def first_transfer(self) -> int:
        """The first column of a send or receive; all later columns are transfers too."""
        return 5 * self.stages

    def transfers(self) -> tuple[list[int], list[int]]:
        """Returns for each column the rank at the other end, and the distance to its code.

        The rank is -1 for other ops.
        """
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

    def of_rank(self, rank: int) -> tuple[dict[type, Table], dict[int, int]]:
        """Returns the columns of a rank's actions, sends and receives, and those of releases."""
        owned_stages = self.plan.placement.stages_of(rank)
        out = [edge for stage in owned_stages for edge, _ in self.leaving[stage]]
        into = [edge for stage in owned_stages for edge, _ in self.entering[stage]]
        ends = {"SF": out, "RB": out, "SB": into, "RF": into}

        def of_edges(letter: str) -> Table:
            return {
                kind: {edge: self.of_edge(letter + kind, edge) for edge in ends[letter + kind]}
                for kind in "FB"
            }

        actions: Table = {
            kind: {stage: self.of_stage(kind, stage) for stage in owned_stages} for kind in _KINDS
        }
        frees = {stage: self.of_stage("FREE", stage) for stage in owned_stages}
        return {Action: actions, Send: of_edges("S"), Recv: of_edges("R")}, frees
