"""Reads the CSV form of torch.distributed.pipelining: a line for each rank, a cell for each slot.

A cell is ``stage kind micro-batch``, an empty one an idle slot, which says nothing about order::

    0F0,0F1,,0B0,,0B1
    ,1F0,1B0,1F1,1B1,
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from typing import Union

from fleetpipe.errors import ScheduleError
from fleetpipe.schedules.action import Action, Fused, Item, flatten, parts
from fleetpipe.schedules.edges import Edge, chain
from fleetpipe.schedules.explain.window import window
from fleetpipe.schedules.operations import Free, Op, Recv, Reduce, Send, Step
from fleetpipe.schedules.placement import Placement
from fleetpipe.schedules.rows import PlanRows, ScheduleRows

_NUMBER = r"(0|[1-9][0-9]*)"
_ACTION = re.compile(f"{_NUMBER}([FIBW]){_NUMBER}")
_FUSED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_TRANSFER = re.compile(f"{_NUMBER}(SEND|RECV)_([FB]){_NUMBER}")
#: What FSDP does with the parameters of a stage; it orders nothing between ranks.
_OF_ONE_RANK = re.compile(f"{_NUMBER}(UNSHARD|RESHARD|REDUCE_GRAD){_NUMBER}?")
_START = re.compile(r"\s*\(?[0-9]")
_EXPECTED = (
    "stage, kind and micro-batch like 0F3 (kinds F B I W), (0F3;1B2)OVERLAP_F_B, 0SEND_F3,"
    " 1RECV_F3, 1SEND_B3, 0RECV_B3, 0UNSHARD, 0RESHARD or 0REDUCE_GRAD"
)

_Cell = Union[Item, Send, Recv]


def is_csv(text: str) -> bool:
    """Whether ``text`` has the CSV form, not that of ``str(schedule)`` or ``str(plan)``."""
    return not text.startswith("#") and ("," in text or _START.match(text) is not None)


def read_csv(
    text: str, placement: str | None, micro_batches: int | None
) -> ScheduleRows | PlanRows:
    """Reads a schedule, or with sends and receives a plan; see ``schedules.read_csv``."""
    lines = list(csv.reader(text.rstrip("\r\n").splitlines()))
    rows = [_read_row(rank, [cell.strip() for cell in line]) for rank, line in enumerate(lines)]
    computed = [[cell for cell in row if isinstance(cell, (Action, Fused))] for row in rows]
    owners = {a.stage: rank for rank, row in enumerate(computed) for a in flatten(row)}
    placed = _place(owners, len(rows), placement)
    if micro_batches is None:
        named = (part.micro_batch for row in rows for cell in row for part in _parts(cell))
        micro_batches = 1 + max(named, default=0)
    if computed == rows:
        return ScheduleRows("CSV", placed, micro_batches, tuple(map(tuple, computed)))
    edges = chain(placed.stages)
    return PlanRows("CSV", placed, micro_batches, edges, tuple(map(_completed, rows)))


def _parts(cell: _Cell) -> tuple[Action | Send | Recv, ...]:
    return (cell,) if isinstance(cell, (Send, Recv)) else parts(cell)


def _completed(cells: Sequence[_Cell]) -> tuple[Op, ...]:
    """Returns the row of a plan with the releases, the reductions and the step that it lacks."""
    row: list[Op] = []
    for cell in cells:
        row.append(cell)
        if isinstance(cell, (Action, Fused)):
            row += (Free(*action[1:]) for action in parts(cell) if action.kind in "BW")
    return (*row, Reduce(), Step())


def _read_row(rank: int, cells: Sequence[str]) -> list[_Cell]:
    row = []
    for index, cell in enumerate(cells):
        if not cell or _OF_ONE_RANK.fullmatch(cell):
            continue
        value = _read_cell(cell)
        if value is None:
            raise ScheduleError(
                f"cannot read {cell!r}",
                where=f"line {rank + 1} (rank {rank}), cell #{index}",
                expected=_EXPECTED,
                got=window(cells, index),
                fix="write the cell in one of these ways, or leave it empty where the rank is idle",
            )
        row.append(value)
    return row


def _read_cell(cell: str) -> _Cell | None:
    match = _ACTION.fullmatch(cell)
    if match is not None:
        return Action(match[2], int(match[1]), int(match[3]))
    match = _FUSED.fullmatch(cell)
    if match is not None:
        found = [_ACTION.fullmatch(part) for part in match[1].split(";")]
        actions = tuple(Action(m[2], int(m[1]), int(m[3])) for m in found if m is not None)
        return Fused(actions) if len(actions) == len(found) > 1 else None
    match = _TRANSFER.fullmatch(cell)
    if match is None:
        return None
    stage, kind = int(match[1]), match[3]
    # A stage sends its value to the next one and its gradient to the one before.
    forth = (match[2] == "SEND") == (kind == "F")
    edge = Edge(stage, stage + 1) if forth else Edge(stage - 1, stage)
    return (Send if match[2] == "SEND" else Recv)(kind, edge, int(match[4]))


def _place(owners: dict[int, int], ranks: int, name: str | None) -> Placement:
    """Returns the placement that has each stage on its rank, or the one named."""
    chunks = -(-(max(owners, default=0) + 1) // ranks)
    if name is not None:
        return Placement(name, ranks, 2 if name == "vee" else chunks)
    placements = [Placement("loop", ranks, chunks)]
    if chunks == 2:
        placements.append(Placement("vee", ranks, 2))
    elif chunks % 2 == 0:
        placements.append(Placement("wave", ranks, chunks))
    odd = [
        next((stage for stage, rank in owners.items() if placement.rank_of(stage) != rank), None)
        for placement in placements
    ]
    if None in odd:
        return placements[odd.index(None)]
    raise ScheduleError(
        "the stages of the CSV are on no known placement",
        expected="; ".join(
            f"under {placement.name} stage {stage} on rank {placement.rank_of(stage)}"
            for placement, stage in zip(placements, odd)
            if stage is not None
        ),
        got=", ".join(
            f"stage {stage} on rank {owners[stage]}" for stage in odd if stage is not None
        ),
        fix="name the placement that is meant (--placement), and it is checked against that",
    )
