"""Times what a rank computes in a step, and counts the messages that it waits for.

It reads the clock a few times in a step, however many actions that has, and around each wait.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from fleetpipe.engine.observer import Blocked, Instruction, Played
from fleetpipe.mesh.turns import here
from fleetpipe.schedules import Action, Fused, Op, Plan, Recv
from fleetpipe.schedules.action import parts
from fleetpipe.schedules.operations import ranks_of
from fleetpipe.systems import ProcessorQueue


class StepTimes(NamedTuple):
    """What a step took on this process, in seconds.

    Attributes:
        cpu: Processor time of its thread, from the begin to the end of the last action.
        wall: The same by the clock, without what it waited for messages, or for a processor.
        data: What passed before, since the step before, without what it waited for a processor.
        limited: Since the step before, in which the limit of the container let it not run.
        awaited: How many messages of each rank of the job it waited for.
    """

    cpu: float
    wall: float
    data: float
    limited: float
    awaited: dict[int, int]


class _Moment(NamedTuple):
    """A moment by the clocks of this thread: of the world, of its work, of what kept it from it."""

    wall: float
    cpu: float
    queued: float
    limited: float

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
        self._queue: ProcessorQueue | None = None
        self._waited = self._data = 0.0
        self._begun = self._ended = _Moment(0.0, 0.0, 0.0, 0.0)
        self._done: _Moment | None = None
        self._awaited: dict[int, int] = {}

    def begin(self) -> None:
        """Begins a step."""
        if self._queue is None:
            self._queue = ProcessorQueue()
        self._waited = 0.0
        self._awaited = {}
        self._begun = self._ended = now = self._now()
        self._data = 0.0 if self._done is None else now.active(self._done)

    def take(self) -> StepTimes:
        """Returns what the step took since :meth:`begin`."""
        before, self._done = self._done or self._begun, self._now()
        # Where several processors were taken away, the group's time is longer than the thread's.
        limited = min(self._done.limited - before.limited, self._done.queued - before.queued)
        cpu = self._ended.cpu - self._begun.cpu
        # Some of the time in the queue may have been a wait for a message too.
        wall = max(cpu, self._ended.active(self._begun) - self._waited)
        return StepTimes(cpu, wall, self._data, limited, self._awaited)

    def _now(self) -> _Moment:
        queued = limited = 0.0
        if self._queue is not None:
            queued, limited = self._queue.seconds(), self._queue.limited_seconds()
        cpu = time.thread_time() + here.helped
        return _Moment(time.monotonic(), cpu, queued, limited)

    def wrap(self, played: Played, op: Op, instruction: Instruction) -> Instruction:
        """See :class:`fleetpipe.engine.observer.Observer`."""
        if isinstance(op, Recv):
            source, _ = ranks_of(op, self._placement)
            return self._waiting(instruction, self._ranks[source])
        return self._ending(instruction) if op == self._last[played.rank] else instruction

    def _waiting(self, instruction: Instruction, peer: int) -> Instruction:
        since: float | None = None

        def received() -> Blocked | None:
            nonlocal since
            blocked = instruction()
            if blocked is not None:
                since = time.monotonic()
            elif since is not None:
                self._waited += time.monotonic() - since
                self._awaited[peer] = self._awaited.get(peer, 0) + 1
                since = None
            return blocked

        return received

    def _ending(self, instruction: Instruction) -> Instruction:
        def ended() -> Blocked | None:
            blocked = instruction()
            self._ended = self._now()
            return blocked

        return ended


def _last_action(row: Sequence[Op]) -> Action | None:
    actions = [part for op in row if isinstance(op, (Action, Fused)) for part in parts(op)]
    return actions[-1] if actions else None
