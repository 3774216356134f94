"""Replays a plan in which every send waits for its receive; one that passes never deadlocks."""

from __future__ import annotations

from typing import NoReturn

from fleetpipe.errors import ScheduleError
from fleetpipe.schedules.action import Action, Fused
from fleetpipe.schedules.explain import window
from fleetpipe.schedules.plan_ops import Op, Recv, Reduce, Send, Step, ranks_of
from fleetpipe.schedules.rows import PlanRows

_COSTS = {"F": 1, "B": 2, "I": 1, "W": 1}

#: Longer than any plan, so that reductions come after all computations and steps after those.
_LAST = 10**15


def linear_order(plan: PlanRows) -> tuple[int, ...]:
    """Returns the rank of each operation in an order that never blocks; see ``Plan.order``."""
    replay = _Rendezvous(plan)
    replay.run()
    # Times never fall along a rank or from a send to its receive, and the sort is stable.
    by_time = sorted(range(len(replay.ranks)), key=replay.times.__getitem__)
    return tuple(replay.ranks[index] for index in by_time)


class _Rendezvous:
    """The replay's state: each rank's position, and the ops done, with rank and nominal time."""

    def __init__(self, plan: PlanRows) -> None:
        self.plan = plan
        self.at = [0] * len(plan.ops)
        self.clock = [0] * len(plan.ops)
        self.ranks: list[int] = []
        self.times: list[int] = []
        self.ends: dict[tuple[object, ...], tuple[int, int]] = {}

    def run(self) -> None:
        """Lets every rank go as far as it can."""
        ready = list(range(len(self.at)))
        while ready:
            self._advance(ready.pop(), ready)
        if self.at != [len(row) for row in self.plan.ops]:
            _raise_deadlock(self.plan, self.at)

    def _advance(self, rank: int, ready: list[int]) -> None:
        row, at, clock = self.plan.ops[rank], self.at, self.clock
        while at[rank] < len(row):
            op = row[at[rank]]
            if not isinstance(op, (Send, Recv)):
                at[rank] += 1
                clock[rank] += _cost(op)
                self.ranks.append(rank)
                self.times.append(clock[rank])
                continue
            ends = self._ends_of(op)
            peer = ends[0] if isinstance(op, Recv) else ends[1]
            if not _meets(self.plan, op, peer, at[peer]):
                break
            clock[rank] = clock[peer] = max(clock[rank], clock[peer])
            for end in ends:
                at[end] += 1
                self.ranks.append(end)
                self.times.append(clock[rank])
            ready.append(peer)

    def _ends_of(self, op: Send | Recv) -> tuple[int, int]:
        """Returns the ranks that send and receive an op, the same for every micro-batch."""
        key = op[:2]
        if key not in self.ends:
            self.ends[key] = ranks_of(op, self.plan.placement)
        return self.ends[key]


def _cost(op: Op) -> int:
    if isinstance(op, Action):
        return _COSTS[op.kind]
    if isinstance(op, Fused):
        return sum(_COSTS[action.kind] for action in op.actions)
    return _LAST if isinstance(op, (Reduce, Step)) else 0


def _meets(plan: PlanRows, op: Send | Recv, peer: int, position: int) -> bool:
    """Whether ``peer`` is ready for the other end of ``op``."""
    row = plan.ops[peer]
    if position == len(row):
        return False
    other = row[position]
    return (
        isinstance(other, Recv if isinstance(op, Send) else Send)
        and other[2] == op[2]
        and other[:2] == op[:2]
    )


def _raise_deadlock(plan: PlanRows, at: list[int]) -> NoReturn:
    waits: dict[int, int] = {}
    for rank, row in enumerate(plan.ops):
        op = row[at[rank]] if at[rank] < len(row) else None
        if isinstance(op, (Send, Recv)):
            ends = ranks_of(op, plan.placement)
            waits[rank] = ends[0] if isinstance(op, Recv) else ends[1]
    rank = min(waits)
    seen: list[int] = []
    while rank in waits and rank not in seen:
        seen.append(rank)
        rank = waits[rank]
    cycle = seen[seen.index(rank) :] if rank in seen else seen
    lines = [_waiting(plan, at, rank, waits[rank]) for rank in cycle]
    raise ScheduleError(
        f"deadlock: {len(cycle)} ranks wait for each other where a send waits for its receive",
        where="\n    ".join(f"rank {r} at #{at[r]}: {window(plan.ops[r], at[r])}" for r in cycle),
        expected="ranks that meet at the two ends of each transfer",
        got="\n    ".join(lines),
        fix="derive the plan with schedule.lower(), which orders both ends of a transfer alike",
    )


def _waiting(plan: PlanRows, at: list[int], rank: int, peer: int) -> str:
    ended = at[peer] == len(plan.ops[peer])
    there = "at its end" if ended else f"at #{at[peer]} {plan.ops[peer][at[peer]]}"
    here = f"rank {rank} at #{at[rank]} {plan.ops[rank][at[rank]]}"
    return f"{here} waits for rank {peer}, which is {there}"
