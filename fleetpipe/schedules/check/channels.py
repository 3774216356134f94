"""Checks that what one rank sends to another is what that one receives, in the same order."""

from __future__ import annotations

from collections import defaultdict
from typing import NoReturn, cast

from fleetpipe.errors import ScheduleError
from fleetpipe.schedules.edges import Edge
from fleetpipe.schedules.explain.window import window
from fleetpipe.schedules.operations import Op, Recv, Send, ranks_of
from fleetpipe.schedules.rows import PlanRows

#: Source rank, target rank, "F" or "B".
Channel = tuple[int, int, str]
_Positions = dict[Channel, list[int]]


def check_channels(plan: PlanRows) -> None:
    """Raises the ScheduleError of a plan in which the two ends of a channel disagree."""
    sends: _Positions = defaultdict(list)
    receives: _Positions = defaultdict(list)
    for row in plan.ops:
        for position, op in enumerate(row):
            if isinstance(op, (Send, Recv)):
                channel = (*ranks_of(op, plan.placement), op.kind)
                (sends if isinstance(op, Send) else receives)[channel].append(position)
    for channel in sorted(set(sends) | set(receives)):
        _check_channel(plan, channel, sends[channel], receives[channel])


def _check_channel(plan: PlanRows, channel: Channel, sends: list[int], receives: list[int]) -> None:
    sender, receiver = plan.ops[channel[0]], plan.ops[channel[1]]
    sent = [_content(sender[position]) for position in sends]
    received = [_content(receiver[position]) for position in receives]
    if sent == received:
        return
    for content in set(sent) - set(received):
        position = sends[sent.index(content)]
        _raise_alone(plan, channel[0], position, "receive", Recv(*content), channel[1])
    for content in set(received) - set(sent):
        position = receives[received.index(content)]
        _raise_alone(plan, channel[1], position, "send", Send(*content), channel[0])
    index = next(index for index, pair in enumerate(zip(sent, received)) if pair[0] != pair[1])
    first, second = sends[index], receives[index]
    raise ScheduleError(
        f"rank {channel[0]} sends {sender[first]} where rank {channel[1]} receives"
        f" {receiver[second]}",
        where=f"rank {channel[0]} at #{first}: {window(sender, first)}\n"
        f"    rank {channel[1]} at #{second}: {window(receiver, second)}",
        expected="sends and receives of a channel (source rank, target rank, direction)"
        " in one order",
        got=f"they differ at entry {index} of the channel",
        fix="derive the plan with schedule.lower(), which orders both ends of a transfer alike",
    )


def _content(op: Op) -> tuple[str, Edge, int]:
    return cast("tuple[str, Edge, int]", op[:3])  # type: ignore[index]


def _raise_alone(
    plan: PlanRows, rank: int, position: int, what: str, partner: Send | Recv, peer: int
) -> NoReturn:
    raise ScheduleError(
        f"{plan.ops[rank][position]} has no {what}",
        where=f"rank {rank} at #{position}: {window(plan.ops[rank], position)}",
        expected=f"{partner} on rank {peer}",
        fix="add it, or derive the plan with schedule.lower(), which writes both ends",
    )
