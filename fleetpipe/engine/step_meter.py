"""Times what a rank computes in a step, and counts the messages that it waits for.

The meter reads the clock a few times in a step, however many actions the step has, and around each
wait.

A GPU computes after the host has queued the work, so the host's clock does not see how long it
takes. There one step in ``EVERY`` is measured, and in it the host waits for the GPU each time.

A machine that others use may take 1.5 times as long for the same work for a while. So a small piece
of work that is always the same, the probe, is timed after some of the actions: the actions' time
divided by the probe's says how much they compute.
"""

from __future__ import annotations

import math
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

#: The most probes of a step, and the additions of each, which take some 2 microseconds.
PROBES, _ADDITIONS = 8, 30

#: On a GPU one step in so many is measured.
EVERY = 10


class StepTimes(NamedTuple):
    """The times of one step in this process, in seconds; 0 for what was not measured.

    Attributes:
        cpu: Processor time of the training thread from the begin of the step to the end of its last
            action. On a GPU, which other threads do not slow down, it equals ``wall``.
        wall: Elapsed time of the same span, without the waits for messages and for a processor.
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
    """One reading of this thread's clocks, in seconds.

    Attributes:
        wall: Elapsed time.
        cpu: Processor time.
        queued: Time in which the thread was ready to run and had no processor.
        limited: Time in which a container's limit kept the process from running.
    """

    wall: float
    cpu: float
    queued: float
    limited: float

    def seconds_active_since(self, before: _Moment) -> float:
        """Returns the elapsed seconds since an earlier reading, without waits for a processor."""
        return max(0.0, self.wall - before.wall - (self.queued - before.queued))


class StepProgress(Protocol):
    """Receives the times of steps, as :class:`fleetpipe.job.records.RunProgress` does.

    Attributes:
        synchronize: Waits until the device has computed all queued work, within a limit.
    """

    synchronize: Callable[[], None]

    def tell_loss(self, loss: Any, waits: bool) -> None:
        """Receives the loss of a step.

        Args:
            loss: The loss.
            waits: Whether reading it would wait for a GPU.
        """

    def begin_step(self) -> None:
        """Receives the moment before the first action of a step runs."""

    def end_step(self, times: StepTimes) -> None:
        """Receives the times of a step when its last action has run."""


class StepMeter(BatchObserver):
    """Times each training batch of this process, and counts the messages that it waits for."""

    def __init__(
        self, plan: Plan, ranks: Sequence[int], progress: StepProgress, probes: bool = True
    ) -> None:
        """Creates a meter that has measured no step yet.

        Args:
            plan: The plan that the engine runs.
            ranks: For each rank of the pipeline, its number in the job.
            progress: The job's ``RunProgress``, which gets the times and the loss of each step.
            probes: Whether to run probes; nobody needs them where one process plays all ranks.
        """
        self._ranks, self._progress = ranks, progress
        self._placement = plan.placement
        actions = [_actions_of(row) for row in plan.ops]
        self._last_actions = [row[-1] if row else None for row in actions]
        self._on_cpu = device_kind() == "cpu"
        # A probe is of the processor.
        probes = probes and self._on_cpu
        #: By rank, the actions after which a probe runs: every n-th.
        self._actions_to_probe = [
            row[:: math.ceil(len(row) / PROBES) or 1] if probes else [] for row in actions
        ]
        self._probes: list[float] = []
        self._probe_seconds = 0.0
        self._queue: ProcessorQueue | None = None
        self._waited = self._data = 0.0
        self._at_begin = self._after_last_action = _Moment(0.0, 0.0, 0.0, 0.0)
        self._at_end: _Moment | None = None
        self._awaited: dict[int, int] = {}
        self._count = 0
        #: Whether this is a step in which the host waits for its GPU, to measure it.
        self._is_measured = False

    def begin(self, batch: Any = None) -> None:
        """Begins a step: reads the clocks."""
        self._progress.begin_step()
        if self._queue is None:
            self._queue = ProcessorQueue()
        self._waited = 0.0
        self._awaited = {}
        self._probes = []
        self._at_begin = self._after_last_action = now = self._read_clocks()
        # On a GPU only where the step before has ended with what it queued.
        ended = self._at_end if self._on_cpu or self._is_measured else None
        self._data = 0.0 if ended is None else now.seconds_active_since(ended)
        if not self._on_cpu:
            self._is_measured = self._count % EVERY == 0
            self._count += 1
            if self._is_measured:
                self._progress.synchronize()
            self._at_begin = self._read_clocks()

    def reduced(self, loss: Any) -> None:
        """Hands the loss of the step to the job's records."""
        self._progress.tell_loss(loss, waits=not self._on_cpu)

    def end(self) -> None:
        """Hands the times of the step to the job's records."""
        self._progress.end_step(self.take())

    def take(self) -> StepTimes:
        """Returns the times of the step that began at :meth:`begin` and ends now."""
        self._wait_for_gpu()
        before, self._at_end = self._at_end or self._at_begin, self._read_clocks()
        # Where several processors were taken away, the group's time is longer than the thread's.
        limited = min(self._at_end.limited - before.limited, self._at_end.queued - before.queued)
        if not self._on_cpu:
            took = 0.0
            if self._is_measured:
                passed = self._after_last_action.wall - self._at_begin.wall
                took = max(0.0, passed - self._waited)
            return StepTimes(took, took, self._data, limited, self._awaited, 0.0)
        cpu = self._after_last_action.cpu - self._at_begin.cpu
        # Some of the time in the queue may have been a wait for a message too.
        wall = max(cpu, self._after_last_action.seconds_active_since(self._at_begin) - self._waited)
        probe = median(self._probes or [0.0])
        return StepTimes(cpu, wall, self._data, limited, self._awaited, probe)

    def _wait_for_gpu(self) -> None:
        """Waits for the GPU, if this step is measured by such waits."""
        if self._is_measured:
            synchronize()

    def _read_clocks(self) -> _Moment:
        """Returns this thread's clocks, without the time of the probes so far."""
        queued = limited = 0.0
        if self._queue is not None:
            queued, limited = self._queue.seconds(), self._queue.limited_seconds()
        # As if there were no probes.
        cpu = time.thread_time() + here.helped - self._probe_seconds
        return _Moment(time.monotonic() - self._probe_seconds - here.idled, cpu, queued, limited)

    def wrap(self, played: Played, op: Op, instruction: Instruction) -> Instruction:
        """Counts the waits of receives, and adds probes and the end of the last action."""
        if isinstance(op, Recv):
            source, _ = ranks_of(op, self._placement)
            return self._count_wait(instruction, self._ranks[source])
        if op in self._actions_to_probe[played.rank]:
            instruction = self._with_probe(instruction)
        return self._with_end(instruction) if op == self._last_actions[played.rank] else instruction

    def _count_wait(self, instruction: Instruction, peer: int) -> Instruction:
        """Wraps a receive: counts its message if the rank had to wait for it, and times the wait.

        Args:
            instruction: The receive.
            peer: The number in the job of the rank that sends the message.
        """
        since: float | None = None

        def receive() -> Blocked | None:
            """Runs the receive, and times it from the first call that is blocked."""
            nonlocal since
            came_first = here.idle > 0
            blocked = instruction()
            if blocked is not None:
                self._wait_for_gpu()
                since = time.monotonic()
            elif since is not None:
                self._wait_for_gpu()
                self._waited += time.monotonic() - since
                self._awaited[peer] = self._awaited.get(peer, 0) + 1
                since = None
            elif came_first:
                self._awaited[peer] = self._awaited.get(peer, 0) + 1
            return blocked

        return receive

    def _with_end(self, instruction: Instruction) -> Instruction:
        """Wraps the step's last action: reads the clocks at its end."""

        def run_last() -> Blocked | None:
            """Runs the action, and reads the clocks."""
            blocked = instruction()
            self._wait_for_gpu()
            self._after_last_action = self._read_clocks()
            return blocked

        return run_last

    def _with_probe(self, instruction: Instruction) -> Instruction:
        """Wraps an action: after it, times a probe, fixed work that shows the processor's speed."""

        def run_with_probe() -> Blocked | None:
            """Runs the action, and times a probe."""
            blocked = instruction()
            if blocked is None:
                # The first one brings its code and data back into the caches.
                first, second = _time_probe(), _time_probe()
                self._probes.append(second)
                self._probe_seconds += first + second
            return blocked

        return run_with_probe


def _time_probe() -> float:
    """Runs a probe, some additions; returns its processor time in seconds."""
    begin = time.thread_time()
    total = 0
    for number in range(_ADDITIONS):
        total += number
    return time.thread_time() - begin


def _actions_of(row: Sequence[Op]) -> list[Action]:
    """Returns the actions of a rank's row of a plan, those of fused pairs one by one."""
    return [part for op in row if isinstance(op, (Action, Fused)) for part in parts(op)]
