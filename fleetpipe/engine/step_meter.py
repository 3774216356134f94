"""Times what a rank computes in a step, and its first message with each other rank.

It reads the clock a few times in a step, however many actions that has, and around each wait.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from fleetpipe.engine.observer import Blocked, Instruction, Played, message_of
from fleetpipe.schedules import Action, Fused, Op, Plan, Recv, Send
from fleetpipe.schedules.action import parts
from fleetpipe.schedules.operations import ranks_of
from fleetpipe.systems import ProcessorQueue
from fleetpipe.transport import MessageKey


class StepTimes(NamedTuple):
    """What a step took on this process, in seconds.

    Attributes:
        cpu: Processor time of its thread, from the begin to the end of the last action.
        wall: The same by the clock, without what it waited for messages, or for a processor.
        data: What passed before, since the step before, without what it waited for a processor.
        sent: The first message to each rank of the job: its rank and the moment, pair after pair.
        taken: The first message of each rank that this one waited for, likewise.
    """

    cpu: float
    wall: float
    data: float
    sent: tuple[float, ...]
    taken: tuple[float, ...]


class _Moment(NamedTuple):
    """A moment by the clocks of this thread: of the world, of its work, of its queueing."""

    wall: float
    cpu: float
    queued: float

    def active(self, before: _Moment) -> float:
        """Returns the time since another moment in which it did not queue for a processor."""
        return max(0.0, self.wall - before.wall - (self.queued - before.queued))


class StepMeter:
    """An observer of the engine, for the ranks that this process plays."""

    def __init__(self, plan: Plan, ranks: Sequence[int]) -> None:
        """Begins with nothing.

        Args:
            plan: What runs.
            ranks: The ranks of the job that are those of the pipeline.
        """
        self._ranks = ranks
        self._placement = plan.placement
        self._last = {rank: _last_action(row) for rank, row in enumerate(plan.ops)}
        self._first: dict[tuple[int, int], MessageKey] = {}
        for row in plan.ops:
            for op in row:
                if isinstance(op, Send):
                    self._first.setdefault(ranks_of(op, plan.placement), message_of(op))
        self._queue: ProcessorQueue | None = None
        self._waited = self._data = 0.0
        self._begun = self._ended = _Moment(0.0, 0.0, 0.0)
        self._done: _Moment | None = None
        self._sent: dict[int, float] = {}
        self._taken: dict[int, float] = {}

    def begin(self) -> None:
        """Begins a step."""
        if self._queue is None:
            self._queue = ProcessorQueue()
        self._waited = 0.0
        self._sent.clear()
        self._taken.clear()
        self._begun = self._ended = now = self._now()
        self._data = 0.0 if self._done is None else now.active(self._done)

    def take(self) -> StepTimes:
        """Returns what the step took since :meth:`begin`."""
        self._done = self._now()
        cpu = self._ended.cpu - self._begun.cpu
        # Some of the time in the queue may have been a wait for a message too.
        wall = max(cpu, self._ended.active(self._begun) - self._waited)
        return StepTimes(cpu, wall, self._data, _flat(self._sent), _flat(self._taken))

    def _now(self) -> _Moment:
        return _Moment(time.monotonic(), time.thread_time(), self._queued())

    def _queued(self) -> float:
        return 0.0 if self._queue is None else self._queue.seconds()

    def wrap(self, played: Played, op: Op, instruction: Instruction) -> Instruction:
        """See :class:`fleetpipe.engine.observer.Observer`."""
        if isinstance(op, Recv):
            source, target = ranks_of(op, self._placement)
            first = self._first.get((source, target)) == message_of(op)
            return self._waiting(instruction, self._ranks[source] if first else None)
        if isinstance(op, Send):
            pair = ranks_of(op, self._placement)
            first = self._first[pair] == message_of(op)
            return self._sending(instruction, self._ranks[pair[1]]) if first else instruction
        return self._ending(instruction) if op == self._last[played.rank] else instruction

    def _waiting(self, instruction: Instruction, peer: int | None) -> Instruction:
        since: float | None = None
        queued = 0.0

        def received() -> Blocked | None:
            nonlocal since, queued
            blocked = instruction()
            if blocked is not None:
                since = time.monotonic()
                queued = self._queued() if peer is not None else 0.0
            elif since is not None:
                now = time.monotonic()
                self._waited += now - since
                since = None
                if peer is not None:
                    # It came before the thread had a processor again.
                    self._taken[peer] = now - (self._queued() - queued)
            return blocked

        return received

    def _sending(self, instruction: Instruction, peer: int) -> Instruction:
        def sent() -> Blocked | None:
            self._sent[peer] = time.monotonic()
            return instruction()

        return sent

    def _ending(self, instruction: Instruction) -> Instruction:
        def ended() -> Blocked | None:
            blocked = instruction()
            self._ended = self._now()
            return blocked

        return ended


def _last_action(row: Sequence[Op]) -> Action | None:
    actions = [part for op in row if isinstance(op, (Action, Fused)) for part in parts(op)]
    return actions[-1] if actions else None


def _flat(moments: dict[int, float]) -> tuple[float, ...]:
    return tuple(number for pair in moments.items() for number in pair)
