"""Checks whether a schedule or a plan can run: complete, in order, deadlock-free, within memory.

In a plan each value must be received before its use and released after it. A plan is replayed as if
each send waited for its receive (a rendezvous): a plan that passes never deadlocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from typing import NoReturn, cast

from fleetpipe.errors import ConfigError, ScheduleError
from fleetpipe.schedules.action import (
    Action,
    Free,
    Fused,
    Op,
    Recv,
    Reduce,
    Send,
    Step,
    micro_batch_numbers,
    ranks_of,
)
from fleetpipe.schedules.costs import Costs
from fleetpipe.schedules.explain import describe_position, entries_around
from fleetpipe.schedules.placement import Edge, crossing_edges
from fleetpipe.schedules.rows import PlanRows, ScheduleRows, computations
from fleetpipe.schedules.simulation import amounts_in_flight, replay

#: For each stage its edges to (or from) other ranks, each with the rank at the other end.
_Crossing = list[list[tuple[Edge, int]]]

#: The way of the messages between two ranks: source rank, target rank, "F" or "B".
Channel = tuple[int, int, str]
#: For each channel the positions of its sends (or receives) in the row of their rank.
_Positions = dict[Channel, list[int]]

#: The time of an action by kind, in the replay of a plan.
_NOMINAL_TIMES = {"F": 1, "B": 2, "I": 1, "W": 1}

#: Longer than any plan, so that reductions come after all computations and steps after those.
_AFTER_ALL = 10**15


def verify(
    schedule: ScheduleRows,
    edges: Iterable[Edge] | None = None,
    memory_cap: float | None = None,
    costs: Costs | None = None,
) -> None:
    """Raises the error of a schedule that cannot run, or exceeds a memory cap."""
    replay(schedule, edges, Costs())
    if memory_cap is not None:
        _check_memory(schedule, memory_cap, costs or Costs())


def _check_memory(schedule: ScheduleRows, cap: float, costs: Costs) -> None:
    """Refuses a schedule in which some rank holds more activations than ``cap`` at once.

    ``cap`` is in bytes if ``costs`` give the bytes of stages, else in forwards of one stage.
    """
    if not cap > 0:
        raise ConfigError(
            "`memory_cap` must be above 0", got=str(cap), fix="give a cap above 0, or leave it out"
        )
    in_bytes = costs.bytes is not None
    unit = "bytes of activations" if in_bytes else "forwards of one stage"
    # A cap counts forwards of whole micro-batches; an amount of 1 is a forward of one slice.
    forwards = 1 if in_bytes else schedule.slices
    costs.check_stages(schedule.placement.stages)
    for rank in range(schedule.placement.ranks):
        amounts = amounts_in_flight(schedule, rank, costs, in_bytes=in_bytes)
        in_flight = [amount.during / forwards for amount in amounts]
        peak = max(in_flight, default=0)
        if peak > cap:
            position = next(index for index, amount in enumerate(in_flight) if amount > cap)
            item = schedule.actions[rank][position]
            raise ScheduleError(
                f"rank {rank} passes the memory cap at {item}",
                where=describe_position(schedule, rank, position),
                expected=f"at most {cap:.10g} {unit} in flight at a time",
                got=f"{in_flight[position]:.10g} there, {peak:.10g} at the peak of the rank",
                fix=f"a cap of {peak:.10g}, or a schedule that holds less",
            )


def verify_plan(plan: PlanRows) -> None:
    """Makes all checks of ``Plan.verify`` except that for deadlocks, which ``Plan.order`` makes."""
    try:
        verify(computations(plan), plan.edges)
    except ScheduleError as error:
        raise ScheduleError(
            f"the computations of the plan are no valid schedule: {error}",
            cause="positions count computations only, without sends, receives and releases",
        ) from error
    leaving, entering = crossing_edges(plan.placement, plan.edges)
    for rank in range(plan.placement.ranks):
        checker = _RowChecker(plan, rank, leaving, entering)
        for position, op in enumerate(plan.ops[rank]):
            checker.check(position, op)
        checker.check_end()
    check_channels(plan)


class _RowChecker:
    """Checks the row of one rank of a plan, operation by operation.

    Attributes:
        plan: The plan.
        rank: The rank.
        row: The operations of the rank, in order.
        position: The index in the row of the operation that is checked.
        marks: What has happened in the row so far, as a byte for each micro-batch, 0 or 1. The keys
            are (kind, stage) for computations, where "B" is B or I, and "W" the last use of the
            stage's activations; ("FREE", stage) for releases; ("SF", edge), ("RF", edge), ("SB",
            edge) and ("RB", edge) for this rank's sends and receives of values and gradients.
        needs: For each (kind, stage) the receives that must stand before its action, all written
            with micro-batch 0.
    """

    def __init__(self, plan: PlanRows, rank: int, leaving: _Crossing, entering: _Crossing) -> None:
        """Prepares the check of a row, of which no operation is marked yet.

        Args:
            plan: The plan.
            rank: The rank whose row is checked.
            leaving: For each stage the edges to other ranks.
            entering: For each stage the edges from other ranks.
        """
        self.plan, self.rank, self.row = plan, rank, plan.ops[rank]
        self.position = 0
        self.marks: dict[tuple[str, int | Edge], bytearray] = {}
        self.needs: dict[tuple[str, int], tuple[Recv, ...]] = {}
        for stage in plan.placement.stages_of(rank):
            self._add_marks(stage, "F", "B", "W", "FREE")
            for edge, _ in leaving[stage]:
                self._add_marks(edge, "SF", "RB")
            for edge, _ in entering[stage]:
                self._add_marks(edge, "RF", "SB")
            gradients = tuple(Recv("B", edge, 0) for edge, _ in leaving[stage])
            self.needs["F", stage] = tuple(Recv("F", edge, 0) for edge, _ in entering[stage])
            self.needs["B", stage] = self.needs["I", stage] = gradients
            self.needs["W", stage] = ()

    def _add_marks(self, subject: int | Edge, *kinds: str) -> None:
        """Adds to :attr:`marks` the kinds of operations on a stage or edge, as not seen yet."""
        for kind in kinds:
            self.marks[kind, subject] = bytearray(self.plan.units)

    def check(self, position: int, op: Op) -> None:
        """Checks the operation at a position of the row, and marks it as done."""
        self.position = position
        if isinstance(op, Action):
            self._check_action(op)
        elif isinstance(op, (Send, Recv)):
            self._check_transfer(op)
        elif isinstance(op, Free):
            self._check_release(op)
        elif isinstance(op, Fused):
            for action in op.actions:
                self._check_action(action)
        else:
            self._check_ending(op)

    def _check_action(self, action: Action) -> None:
        """Refuses an action whose inputs have not been received; else marks it as done."""
        kind, stage, micro_batch = action
        for need in self.needs[kind, stage]:
            if not self.marks["R" + need.kind, need.edge][micro_batch]:
                lacking = need._replace(micro_batch=micro_batch)
                self._fail(
                    f"{action} stands before its input has been received",
                    f"{lacking} earlier on rank {self.rank}",
                )
        self.marks["B" if kind == "I" else kind, stage][micro_batch] = 1
        if kind == "B":
            self.marks["W", stage][micro_batch] = 1

    def _check_transfer(self, op: Send | Recv) -> None:
        """Refuses a transfer of another rank's edge, and a send without the value to be sent."""
        marks = self.marks.get((op.letter + op.kind, op.edge))
        if marks is None:
            self._raise_misplaced(op)
        self._mark(op, marks, op.micro_batch)
        if isinstance(op, Recv):
            return
        # The stage whose action computes the value, or the gradient, on this rank.
        stage = op.edge.source if op.kind == "F" else op.edge.target
        if not self.marks[op.kind, stage][op.micro_batch]:
            maker = f"F{stage}" if op.kind == "F" else f"B{stage} or I{stage}"
            self._fail(
                f"{op} stands before its value is made",
                f"{maker}, micro-batch {op.micro_batch}, earlier on rank {self.rank}",
            )
        if op.kind == "F" and self.marks["FREE", stage][op.micro_batch]:
            self._fail(
                f"{op} stands after the activations were released",
                f"FREE{stage}.{op.micro_batch} later on rank {self.rank}",
            )

    def _check_release(self, op: Free) -> None:
        """Refuses a release of another rank's stage, or before the last use of its activations."""
        marks = self.marks.get(("FREE", op.stage))
        if marks is None:
            self._fail(f"{op} is of a stage that rank {self.rank} does not own", "its own stages")
        self._mark(op, marks, op.micro_batch)
        if not self.marks["F" if self.plan.forward_only else "W", op.stage][op.micro_batch]:
            self._fail(
                f"{op} stands before the last use of what it releases",
                "F earlier" if self.plan.forward_only else "B, or I and W, earlier",
            )

    def _mark(self, op: Send | Recv | Free, marks: bytearray, micro_batch: int) -> None:
        """Marks an operation as seen in the row; refuses a second one, or an unknown micro-batch.

        Args:
            op: The operation, for the error.
            marks: The entry of ``self.marks`` for the operation's kind and its stage or edge.
            micro_batch: The number of the operation's micro-batch, or of its slice.
        """
        if micro_batch >= self.plan.units:
            last = micro_batch_numbers(self.plan.micro_batches, self.plan.slices)[-1]
            self._fail(
                f"{op} is of a micro-batch that does not exist",
                f"a micro-batch in 0..{last}",
            )
        if marks[micro_batch]:
            self._fail(f"{op} stands twice", f"one {op}, earlier in the row")
        marks[micro_batch] = 1

    def _raise_misplaced(self, op: Send | Recv) -> NoReturn:
        """Raises the error of a transfer that does not belong into this rank's row."""
        if op.edge not in self.plan.edges:
            edges = ", ".join(map(str, self.plan.edges)) or "none"
            self._fail(f"{op} is of an edge that the plan does not have", f"one of: {edges}")
        ranks = ranks_of(op, self.plan.placement)
        if ranks[0] == ranks[1]:
            self._fail(
                f"{op} is of an edge inside one rank", "transfers between different ranks only"
            )
        owner = ranks[0] if isinstance(op, Send) else ranks[1]
        self._fail(f"{op} is on the wrong rank", f"rank {owner}")

    def _check_ending(self, op: Reduce | Step) -> None:
        """Refuses REDUCE and STEP anywhere but at the end of the row, in this order."""
        if self.plan.forward_only:
            self._fail(f"{op} in a forward-only plan", "neither REDUCE nor STEP")
        after = self.row[self.position + 1 :]
        if after != ((Step(),) if isinstance(op, Reduce) else ()):
            self._fail(
                f"{op} stands before {after[0] if after else 'the end'}",
                "REDUCE and then STEP at the end of the row, after the last backward",
            )

    def check_end(self) -> None:
        """Checks, at the end of the row, that no operation is missing."""
        self.position = len(self.row)
        if not self.plan.forward_only and self.row[-2:] != (Reduce(), Step()):
            lacking = "STEP" if self.row[-1:] == (Reduce(),) else "REDUCE"
            self._fail(f"{lacking} is missing", "REDUCE and then STEP at the end of the row")
        for stage in self.plan.placement.stages_of(self.rank):
            micro_batch = self.marks["FREE", stage].find(0)
            if micro_batch >= 0:
                self._fail(
                    f"FREE{stage}.{micro_batch} is missing",
                    "one FREE for each stage of the rank and each micro-batch",
                )

    def _fail(self, summary: str, expected: str) -> NoReturn:
        """Raises an error at the position of the row that is checked, with its summary."""
        raise ScheduleError(
            summary,
            where=_describe_position(self.plan, self.rank, self.position),
            expected=expected,
            fix="derive the plan with schedule.lower(), which puts each entry where it belongs",
        )


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
    """Raises the error of a channel whose sends and receives are not the same in one order.

    ``sends`` and ``receives`` are positions in the rows of the source rank and of the target rank.
    """
    sender, receiver = plan.ops[channel[0]], plan.ops[channel[1]]
    sent = [_key_of_transfer(sender[position]) for position in sends]
    received = [_key_of_transfer(receiver[position]) for position in receives]
    if sent == received:
        return
    for content in set(sent) - set(received):
        position = sends[sent.index(content)]
        _raise_unmatched(plan, channel[0], position, "receive", Recv(*content), channel[1])
    for content in set(received) - set(sent):
        position = receives[received.index(content)]
        _raise_unmatched(plan, channel[1], position, "send", Send(*content), channel[0])
    index = next(index for index, pair in enumerate(zip(sent, received)) if pair[0] != pair[1])
    first, second = sends[index], receives[index]
    raise ScheduleError(
        f"rank {channel[0]} sends {sender[first]} where rank {channel[1]} receives"
        f" {receiver[second]}",
        where=f"{_describe_position(plan, channel[0], first)}\n"
        f"    {_describe_position(plan, channel[1], second)}",
        expected="sends and receives of a channel (source rank, target rank, direction)"
        " in one order",
        got=f"they differ at entry {index} of the channel",
        fix="derive the plan with schedule.lower(), which orders both ends of a transfer alike",
    )


def _key_of_transfer(op: Op) -> tuple[str, Edge, int]:
    """Returns kind, edge and micro-batch, which a send and its receive have in common."""
    return cast("tuple[str, Edge, int]", op[:3])  # type: ignore[index]


def _raise_unmatched(
    plan: PlanRows, rank: int, position: int, missing_half: str, partner: Send | Recv, peer: int
) -> NoReturn:
    """Raises the error of a send without its receive, or of a receive without its send.

    The transfer is at a position of a rank's row; ``partner``, the ``missing_half`` ("send" or
    "receive"), should be in the row of rank ``peer``.
    """
    raise ScheduleError(
        f"{plan.ops[rank][position]} has no {missing_half}",
        where=_describe_position(plan, rank, position),
        expected=f"{partner} on rank {peer}",
        fix="add it, or derive the plan with schedule.lower(), which writes both ends",
    )


def linear_order(plan: PlanRows) -> tuple[int, ...]:
    """Returns the rank of each operation in an order that never blocks; see ``Plan.order``.

    It replays the plan with nominal times; each send waits for its receive.
    """
    positions = [0 for _ in plan.ops]
    clock = [0 for _ in plan.ops]
    # Of each operation that has run: its rank, and the time at which it ended.
    ranks: list[int] = []
    times: list[int] = []
    ends_of = cache(lambda kind, edge: ranks_of(Send(kind, edge, 0), plan.placement))
    # Ranks that may be able to go on.
    ready = list(range(len(plan.ops)))
    while ready:
        rank = ready.pop()
        row = plan.ops[rank]
        while positions[rank] < len(row):
            op = row[positions[rank]]
            ends: tuple[int, ...] = (rank,)
            if isinstance(op, (Send, Recv)):
                ends = ends_of(op.kind, op.edge)
                peer = ends[0] if isinstance(op, Recv) else ends[1]
                if not _is_at_other_end(plan, op, peer, positions[peer]):
                    break
                clock[rank] = clock[peer] = max(clock[rank], clock[peer])
                ready.append(peer)
            else:
                clock[rank] += _nominal_time(op)
            for end in ends:
                positions[end] += 1
                ranks.append(end)
                times.append(clock[rank])
    if positions != [len(row) for row in plan.ops]:
        _raise_deadlock(plan, positions)
    # Times never fall along a rank or from a send to its receive, and the sort is stable.
    return tuple(ranks[index] for index in sorted(range(len(ranks)), key=times.__getitem__))


def _nominal_time(op: Op) -> int:
    """Returns the time that an operation takes in the replay of a plan; 0 for a release."""
    if isinstance(op, Action):
        return _NOMINAL_TIMES[op.kind]
    if isinstance(op, Fused):
        return sum(_NOMINAL_TIMES[action.kind] for action in op.actions)
    return _AFTER_ALL if isinstance(op, (Reduce, Step)) else 0


def _is_at_other_end(plan: PlanRows, op: Send | Recv, peer: int, position: int) -> bool:
    """Returns whether the partner of a transfer is at a position of the row of rank ``peer``."""
    row = plan.ops[peer]
    if position == len(row):
        return False
    other = row[position]
    return (
        isinstance(other, Recv if isinstance(op, Send) else Send)
        and other[2] == op[2]
        and other[:2] == op[:2]
    )


def _raise_deadlock(plan: PlanRows, positions: list[int]) -> NoReturn:
    """Raises the error of ranks that wait for each other.

    ``positions`` has for each rank the position in its row of the operation that it cannot run.
    """
    # For each rank that stands at a transfer, the rank at the other end, for which it waits.
    peers: dict[int, int] = {}
    for rank, row in enumerate(plan.ops):
        op = row[positions[rank]] if positions[rank] < len(row) else None
        if isinstance(op, (Send, Recv)):
            ends = ranks_of(op, plan.placement)
            peers[rank] = ends[0] if isinstance(op, Recv) else ends[1]
    # From rank to awaited rank, until one comes a second time: from there on it is the cycle.
    rank = min(peers)
    seen: list[int] = []
    while rank in peers and rank not in seen:
        seen.append(rank)
        rank = peers[rank]
    cycle = seen[seen.index(rank) :] if rank in seen else seen
    lines = [_describe_wait(plan, positions, rank, peers[rank]) for rank in cycle]
    raise ScheduleError(
        f"deadlock: {len(cycle)} ranks wait for each other where a send waits for its receive",
        where="\n    ".join(_describe_position(plan, rank, positions[rank]) for rank in cycle),
        expected="ranks that meet at the two ends of each transfer",
        got="\n    ".join(lines),
        fix="derive the plan with schedule.lower(), which orders both ends of a transfer alike",
    )


def _describe_position(plan: PlanRows, rank: int, position: int) -> str:
    """Returns in words where an operation of a plan is: ``rank 1 at #17: .. >>SB0>1.1<< ..``."""
    return f"rank {rank} at #{position}: {entries_around(plan.ops[rank], position)}"


def _describe_wait(plan: PlanRows, positions: list[int], rank: int, peer: int) -> str:
    """Returns in words that a rank waits for rank ``peer``, and which operations both are at."""
    ended = positions[peer] == len(plan.ops[peer])
    there = "at its end" if ended else f"at #{positions[peer]} {plan.ops[peer][positions[peer]]}"
    here = f"rank {rank} at #{positions[rank]} {plan.ops[rank][positions[rank]]}"
    return f"{here} waits for rank {peer}, which is {there}"
