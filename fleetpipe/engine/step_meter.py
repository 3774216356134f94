"""Times what a rank computes in a step, and counts the messages that it waits for.

It reads the clock a few times in a step, however many actions the step has, and around each wait.

A GPU computes after the host has queued the work, so the host's clock does not see how long it
takes. There one step in ``EVERY`` is measured, and in it the host waits for the GPU each time.

A machine that others use may take 1.5 times as long for the same work for a while. So a small piece
of work that is always the same, the probe, is timed after some of the actions: their time divided
by the probe's says how much they compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple, Protocol

from fleetpipe.engine.observer import BatchObserver, Blocked, Instruction, Played
from fleetpipe.mesh.turns import here
from fleetpipe.paddle_api.device import device_kind, synchronize
from fleetpipe.schedules import Action, Fused, Op, Plan, Recv
from fleetpipe.schedules.action import parts, ranks_of
from fleetpipe.systems import ProcessorQueue

#: Most probes of a step, and the additions of each, which take some 2 microseconds.
PROBES, _ADDITIONS = 8, 30

#: On a GPU, of how many steps one is measured.
EVERY = 10


class StepTimes(NamedTuple):
    """Times of one step on this process, in seconds; ``cpu``, ``wall`` or ``data`` 0: not measured.

    Attributes:
        cpu: Processor time of the training thread until the end of the last action. On a GPU, which
            other threads do not slow down, it equals ``wall``.
        wall: The same in elapsed time, without the waits for messages and for a processor.
        data: Elapsed time between the step before and this one, without the waits for a processor.
        limited: Time since the step before in which the container's limit kept the process from
            running.
        awaited: For each rank of the job, the number of its messages that this process waited for.
        probe: Median processor time of a probe in the step; 0 if none ran.
    """

    cpu: float
    wall: float
    data: float
    limited: float
    awaited: dict[int, int]
    probe: float


class _Moment(NamedTuple):
    """One reading of this thread's clocks: elapsed, computing, and kept from running."""

    wall: float
    cpu: float
    queued: float
    limited: float

    def active(self, before: _Moment) -> float:
        """Returns the elapsed time since another reading, without the waits for a processor."""
        return max(0.0, self.wall - before.wall - (self.queued - before.queued))


class Account(Protocol):
    """Stores the times of steps; see :class:`fleetpipe.job.records.RunProgress`.

    Attributes:
        synchronize: Waits until the device has computed all queued work, within a limit.
    """

    synchronize: Callable[[], None]

    def tell_loss(self, loss: Any, waits: bool) -> None:
        """Called with the loss of a step; ``waits``: whether to read it is to wait for a GPU."""

    def begin_step(self) -> None:
        """Called when the first action of a step is about to run."""

    def end_step(self, times: StepTimes) -> None:
        """Called with the times of a step when its last action has run."""


class StepMeter(BatchObserver):
    """Times training batches, for the ranks that this process plays."""

    def __init__(
        self, plan: Plan, ranks: Sequence[int], account: Account, probes: bool = True
    ) -> None:
        """Creates a meter that has measured no step yet.

        Args:
            plan: The plan that the engine runs.
            ranks: The numbers in the job of the pipeline's ranks.
            account: Receives the times of each step.
            probes: Whether to run probes; nobody needs them where one process plays all ranks.
        """
        self._ranks, self._account = ranks, account
        self._placement = plan.placement
        actions = [_actions(row) for row in plan.ops]
        self._last = [row[-1] if row else None for row in actions]
        self._on_cpu = device_kind() == "cpu"
        # A probe is of the processor.
        probes = probes and self._on_cpu
        self._probed = [row[:: -(-len(row) // PROBES) or 1] if probes else [] for row in actions]
        self._probes: list[float] = []
        self._probing = 0.0
        self._queue: ProcessorQueue | None = None
        self._waited = self._data = 0.0
        self._begun = self._ended = _Moment(0.0, 0.0, 0.0, 0.0)
        self._done: _Moment | None = None
        self._awaited: dict[int, int] = {}
        self._count = 0
        #: Whether this is a step in which the host waits for its GPU.
        self._waits = False

    def begin(self, batch: Any = None) -> None:
        """Reads the clocks at the begin of a step."""
        self._account.begin_step()
        if self._queue is None:
            self._queue = ProcessorQueue()
        self._waited = 0.0
        self._awaited = {}
        self._probes = []
        self._begun = self._ended = now = self._now()
        # On a GPU only where the step before has ended with what it queued.
        ended = self._done if self._on_cpu or self._waits else None
        self._data = 0.0 if ended is None else now.active(ended)
        if not self._on_cpu:
            self._waits = self._count % EVERY == 0
            self._count += 1
            if self._waits:
                self._account.synchronize()
            self._begun = self._now()

    def reduced(self, loss: Any) -> None:
        """Hands the loss of the step to the account."""
        self._account.tell_loss(loss, waits=not self._on_cpu)

    def end(self) -> None:
        """Hands the times of the step to the account."""
        self._account.end_step(self.take())

    def take(self) -> StepTimes:
        """Returns the times of the step since :meth:`begin`."""
        self._wait()
        before, self._done = self._done or self._begun, self._now()
        # Where several processors were taken away, the group's time is longer than the thread's.
        limited = min(self._done.limited - before.limited, self._done.queued - before.queued)
        if not self._on_cpu:
            took = max(0.0, self._ended.wall - self._begun.wall - self._waited) * self._waits
            return StepTimes(took, took, self._data, limited, self._awaited, 0.0)
        cpu = self._ended.cpu - self._begun.cpu
        # Some of the time in the queue may have been a wait for a message too.
        wall = max(cpu, self._ended.active(self._begun) - self._waited)
        probe = median(self._probes or [0.0])
        return StepTimes(cpu, wall, self._data, limited, self._awaited, probe)

    def _wait(self) -> None:
        """Waits for the GPU, if this step is measured with waits."""
        if self._waits:
            synchronize()

    def _now(self) -> _Moment:
        queued = limited = 0.0
        if self._queue is not None:
            queued, limited = self._queue.seconds(), self._queue.limited_seconds()
        # As if there were no probes.
        cpu = time.thread_time() + here.helped - self._probing
        return _Moment(time.monotonic() - self._probing - here.idled, cpu, queued, limited)

    def wrap(self, played: Played, op: Op, instruction: Instruction) -> Instruction:
        """See :class:`fleetpipe.engine.observer.Observer`."""
        if isinstance(op, Recv):
            source, _ = ranks_of(op, self._placement)
            return self._count_wait(instruction, self._ranks[source])
        if op in self._probed[played.rank]:
            instruction = self._with_probe(instruction)
        return self._note_end(instruction) if op == self._last[played.rank] else instruction

    def _count_wait(self, instruction: Instruction, peer: int) -> Instruction:
        since: float | None = None

        def receive() -> Blocked | None:
            nonlocal since
            came_first = here.idle > 0
            blocked = instruction()
            if blocked is not None:
                self._wait()
                since = time.monotonic()
            elif since is not None:
                self._wait()
                self._waited += time.monotonic() - since
                self._awaited[peer] = self._awaited.get(peer, 0) + 1
                since = None
            elif came_first:
                self._awaited[peer] = self._awaited.get(peer, 0) + 1
            return blocked

        return receive

    def _note_end(self, instruction: Instruction) -> Instruction:
        def run_last() -> Blocked | None:
            blocked = instruction()
            self._wait()
            self._ended = self._now()
            return blocked

        return run_last

    def _with_probe(self, instruction: Instruction) -> Instruction:
        def run_with_probe() -> Blocked | None:
            blocked = instruction()
            if blocked is None:
                # The first brings back into the caches what the action has driven out.
                first, second = _probe(), _probe()
                self._probes.append(second)
                self._probing += first + second
            return blocked

        return run_with_probe


def _probe() -> float:
    begin = time.thread_time()
    total = 0
    for number in range(_ADDITIONS):
        total += number
    return time.thread_time() - begin


def _actions(row: Sequence[Op]) -> list[Action]:
    return [part for op in row if isinstance(op, (Action, Fused)) for part in parts(op)]
