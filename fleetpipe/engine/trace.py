"""Records every action and transfer of real steps, gathers them on rank 0, and draws them.

The records have the form of a simulated schedule's events, so that one trace and one picture show
measured times beside predicted ones. On a GPU the rank waits until the GPU has computed each
operation of a recorded step; a trace says so.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any, Protocol

from fleetpipe import log, systems
from fleetpipe.arguments import require_folder
from fleetpipe.engine.observer import BatchObserver, Blocked, Instruction, Played, Stopwatch
from fleetpipe.errors import PackageNotFound
from fleetpipe.extras import INSTALLED_BY, extra
from fleetpipe.mesh.groups import Group
from fleetpipe.mesh.turns import here
from fleetpipe.paddle_api.device import device_clock, device_kind
from fleetpipe.schedules import Action, Costs, Op, Recv, Schedule, Send
from fleetpipe.schedules.forms.trace import (
    MICROSECONDS_PER_SECOND,
    Event,
    caveat,
    events_of,
    figures_of,
    median_step,
    with_early,
    write_trace,
)
from fleetpipe.transport import Transport
from fleetpipe.transport.hosts import host_name

_log = log.logger(__name__)

#: Steps that a trace stores by default.
MOST_STEPS = 20
#: Messages that go back and forth to compare the clocks of two hosts.
_ROUNDS = 8

#: An :class:`Event` without its rank, as ranks send it to rank 0.
Record = tuple[Any, ...]


class TracedJob(Protocol):
    """A job as a trace uses it: some members of :class:`fleetpipe.job.job.Job`.

    Attributes:
        endings: Functions to call when the job ends.
        progress: The job's ``RunProgress``: ``step`` is the number of steps that are done, and
            ``wall_time`` divides the time between two of them.
    """

    endings: list[Callable[[], None]]
    progress: Any

    def connect(self) -> Mapping[int, Transport]:
        """Returns the transport of each rank of the pipeline that this process plays."""

    def group(self) -> Group:
        """Returns the group of the pipeline's ranks."""

    def leads(self, *but: str) -> bool:
        """Returns whether this process is first on every axis except those in ``but``."""


class Trace(BatchObserver):
    """Records some steps of one pipeline: those between :meth:`begin_step` and :meth:`end_step`.

    The constructor and :meth:`end_step` are collective.

    Attributes:
        clock_error: The largest error, in seconds, of the comparison of the ranks' clocks.
    """

    def __init__(
        self,
        folder: Path,
        schedule: Schedule,
        ranks: Iterable[int],
        group: Group,
        most_steps: int = MOST_STEPS,
        progress: Any = None,
    ) -> None:
        """Creates the trace and compares the clocks of the ranks. Collective.

        Args:
            folder: Where rank 0 writes ``trace.json``, ``predicted.png`` and ``measured.png``.
            schedule: The schedule that runs.
            ranks: The ranks of the pipeline that this process plays.
            group: The group of all ranks of the pipeline.
            most_steps: Number of steps to store; a longer run stores the last ones.
            progress: The job's ``RunProgress``, for the time between steps; None leaves it out.
        """
        self._records: dict[int, list[Record]] = {rank: [] for rank in ranks}
        self._folder = folder
        self._schedule = schedule
        self._group = group
        #: The events of each stored step, on rank 0, and the steps' numbers in their run.
        self._steps: deque[list[Event]] = deque(maxlen=most_steps)
        self._numbers: deque[int] = deque(maxlen=most_steps)
        #: The number of steps that were recorded, also of those no longer stored.
        self._count = 0
        self._progress = progress
        self._recording = False
        self._now = device_clock()
        #: Seconds by which this rank's clock is ahead of rank 0's.
        self._offset, self.clock_error = _compare_clocks(group)
        #: Measures how long this thread waits for a processor, and the seconds of its last reading.
        self._queue: systems.ProcessorQueue | None = None
        self._queued = 0.0
        #: When the step began: the seconds for which the container's limit of processor time had
        #: stopped this process, and those that the hypervisor had given to other machines.
        self._limited_before = self._stolen_before = 0.0
        #: For each stored step, the means over ranks: by "limited" and "stolen" the seconds that
        #: the limit and the hypervisor took of it, and by the parts of ``records.BETWEEN`` (data,
        #: callbacks, ..) the seconds between it and the step before.
        self._overheads: deque[dict[str, float]] = deque(maxlen=most_steps)
        self._machine = _describe_machine(group, len(self._records))

    def wrap(self, played: Played, op: Op, instruction: Instruction) -> Instruction:
        """Wraps actions, sends and receives: records when they begin and end.

        Args:
            played: The rank that runs the operation.
            op: The operation.
            instruction: Runs it.

        Returns:
            An instruction that is timed while a step is recorded; for any other operation,
            ``instruction`` itself.
        """
        if not isinstance(op, (Action, Send, Recv)):
            return instruction
        name, records = str(op), self._records[played.rank]

        def run_timed() -> Blocked | None:
            """Runs the instruction; first sets ``here.waited``, the sum of its waits, to 0."""
            here.waited = 0.0
            return instruction()

        def record(begin: float, end: float) -> None:
            """Stores an event: its times, its waits, and its wait for a processor."""
            before, self._queued = self._queued, self._queue.seconds() if self._queue else 0.0
            # Its field ``early``, 0 here, needs all events of the step: ``with_early`` sets it.
            records.append((name, begin, end, here.waited, 0, self._queued - before))

        timed = Stopwatch(run_timed, record, self._now)
        return lambda: timed() if self._recording else instruction()

    def begin_step(self) -> None:
        """Begins to record a step; drops an earlier one that did not end."""
        self._recording = True
        for records in self._records.values():
            records.clear()
        self._queue = self._queue or systems.ProcessorQueue()
        self._queued = self._queue.seconds()
        self._limited_before = self._queue.limited_seconds()
        self._stolen_before = systems.stolen_seconds()

    def end_step(self, number: int | None = None) -> None:
        """Gathers the step's events on rank 0 and stops recording. Collective.

        Args:
            number: Number of the step in its run, from 1; None: the number of steps recorded so
                far.
        """
        self._recording = False
        # By rank, the records in the time of rank 0's clock.
        shifted = {
            str(rank): [
                (name, start - self._offset, end - self._offset, *more)
                for name, start, end, *more in records
            ]
            for rank, records in self._records.items()
        }
        limited = self._queue.limited_seconds() if self._queue else 0.0
        # Where this process's time went, besides the operations: see ``_overheads``.
        overhead = {
            **({} if self._progress is None else self._progress.wall_time.between),
            "limited": limited - self._limited_before,
            "stolen": systems.stolen_seconds() - self._stolen_before,
        }
        gathered = self._group.all_gather([shifted, overhead])
        self._count += 1
        self._numbers.append(self._count if number is None else number)
        if self._group.rank == 0:
            step = [
                Event(int(rank), *fields)
                for records_of, _ in gathered
                for rank, records in records_of.items()
                for fields in records
            ]
            # Each event also says how many actions before it in the schedule began later.
            self._steps.append(with_early(step, self._schedule.actions))
            of_ranks = [each for _, each in gathered]
            means = {name: fmean(each[name] for each in of_ranks) for name in overhead}
            self._overheads.append(means)

    def steps(self) -> list[list[Event]]:
        """Returns the events of each stored step on rank 0, an empty list elsewhere."""
        return list(self._steps)

    def write(self) -> str | None:
        """Writes ``trace.json`` and the pictures on rank 0.

        Returns:
            A line for the user with the measured figures; None on other ranks, or if no step was
            recorded.
        """
        if not self._steps:
            return None
        self._folder.mkdir(parents=True, exist_ok=True)
        steps = self.steps()
        begin = min(event.start for step in steps for event in step)
        measured = [_shift_events(step, -begin) for step in steps]
        # The first step of a job also allocates memory and loads code: it is left out, if it is
        # among the stored steps and not the only one.
        cold = 1 if len(steps) == self._count > 1 else 0
        warm = steps[cold:]
        costs = measured_costs(self._schedule, [event for step in warm for event in step])
        predicted = self._schedule.simulate(costs)
        # The index of the step that the picture shows: the one with the median bubble rate.
        chosen = cold + median_step(warm)
        step = measured[chosen]
        first_action = min(event.start for event in step if event.actions)
        tracks = {
            "measured": [event for step in measured for event in step],
            "predicted": _shift_events(events_of(predicted), first_action),
        }
        microseconds = dict.fromkeys(tracks, MICROSECONDS_PER_SECOND)
        placement = self._schedule.placement
        path, numbers = self._folder / "trace.json", list(self._numbers)
        kind = device_kind()
        of_steps = list(self._overheads)
        overhead = {name: [each[name] for each in of_steps] for name in of_steps[0]}
        machine: dict[str, object] = {**self._machine, "load": systems.load()}
        machine.update({name: overhead.pop(name) for name in ("limited", "stolen")})
        machine["between"] = overhead
        write_trace(
            path,
            tracks,
            placement,
            microseconds=microseconds,
            steps=numbers,
            device=kind,
            machine=machine,
        )
        rate = figures_of(step).bubble_rate
        title = f"measured: step {numbers[chosen]} · bubble {rate:.2%}"
        panel = extra("pictures")
        beside = panel.panel_of(predicted, "s", "predicted")
        shown = panel.Panel(title, _shift_events(step, -first_action), placement, "s")
        drawn = self._draw({"predicted.png": [beside], "measured.png": [shown, beside]})
        return (
            f"trace of {len(steps)} of {self._count} steps in {self._folder}: bubble rate "
            f"{rate:.4f} measured{' after the first step' * cold}, "
            f"{predicted.bubble_rate:.4f} predicted from the median cost of each action; "
            f"clocks agree within {self.clock_error * 1e6:.0f} us"
            + f"; no pictures: they need matplotlib ({INSTALLED_BY['matplotlib']})" * (not drawn)
            + f". {caveat(kind)}" * (kind != "cpu")
        )

    def _draw(self, pictures: Mapping[str, list[Any]]) -> bool:
        """Draws pictures into the folder; returns whether matplotlib is installed, which it needs.

        Args:
            pictures: The panels of each picture, by the name of its file.
        """
        try:
            for name, panels in pictures.items():
                extra("pictures.picture").draw(panels, self._folder / name)
        except PackageNotFound:
            return False
        return True


class JobTrace(Trace):
    """Traces all steps of a job and writes the files when the job ends."""

    def __init__(self, folder: str, schedule: Schedule, job: TracedJob) -> None:
        """Begins to trace a job. Collective over the pipeline.

        Args:
            folder: Where rank 0 writes the files.
            schedule: The schedule that runs.
            job: The current ``Job``.

        Raises:
            ConfigError: Nothing can be written into the folder, on rank 0.
        """
        group = job.group()
        if group.rank == 0:
            require_folder('fleetpipe_configs["trace"]', folder)
        path = Path(folder).absolute()
        super().__init__(path, schedule, job.connect(), group, progress=job.progress)
        job.endings.append(self._log_summary)

    def begin(self, batch: Any) -> None:
        """Starts to record a step."""
        self.begin_step()

    def end(self) -> None:
        """Gathers the events of the step. Collective."""
        self.end_step(self._progress.step)

    def _log_summary(self) -> None:
        """Writes the files, and logs the line about them."""
        summary = self.write()
        if summary is not None:
            _log.info(summary)


def _shift_events(events: list[Event], seconds: float) -> list[Event]:
    """Returns events as they would be ``seconds`` later."""
    return [
        event._replace(start=event.start + seconds, end=event.end + seconds) for event in events
    ]


def _describe_machine(group: Group, ranks: int) -> dict[str, object]:
    """Returns for each host its number of ranks and of processors that they may use. Collective.

    Args:
        group: All processes of the pipeline.
        ranks: How many ranks this process plays.

    Returns:
        ``{"ranks": [..], "processors": [..]}``, with a number for each host.
    """
    ranks_of: defaultdict[str, int] = defaultdict(int)
    processors_of: defaultdict[str, set[int]] = defaultdict(set)
    for host, played, usable in group.all_gather([host_name(), ranks, systems.processor_numbers()]):
        ranks_of[host] += played
        processors_of[host].update(usable)
    processors = [len(numbers) for numbers in processors_of.values()]
    return {"ranks": list(ranks_of.values()), "processors": processors}


def _compare_clocks(group: Group) -> tuple[float, float]:
    """Returns the offset of this rank's clock to rank 0's, and the largest error of any offset.

    Both are in seconds; the error is the same on all ranks. Collective. The ranks of one host share
    a clock. Between hosts, several messages go back and forth, and the middle of the fastest round
    trip is taken for the same moment.
    """
    hosts = group.all_gather(host_name())
    if len(set(hosts)) == 1:
        return 0.0, 0.0
    best = (0.0, float("inf"))
    for _ in range(_ROUNDS):
        requested = time.perf_counter()
        answers = group.all_gather(time.perf_counter())
        answered = time.perf_counter()
        error = (answered - requested) / 2
        if error < best[1]:
            best = ((requested + answered) / 2 - answers[0], error)
    worst = max(group.all_gather(best[1]))
    return (0.0 if group.rank == 0 else best[0]), worst


def measured_costs(schedule: Schedule, events: list[Event]) -> Costs:
    """Returns for each stage the median seconds of each kind of action among some events.

    Args:
        schedule: The schedule of which the events are.
        events: Measured events of one or several steps.
    """
    durations: dict[tuple[str, int], list[float]] = defaultdict(list)
    for event in events:
        for action in event.actions:
            durations[action.kind, action.stage].append(event.end - event.start)

    def medians_of_stages(kind: str) -> tuple[float, ...] | None:
        """Returns by stage the median of a kind; None if no stage has such an action."""
        stages = range(schedule.placement.stages)
        if not any((kind, stage) in durations for stage in stages):
            return None
        return tuple(median(durations[kind, stage] or [0.0]) for stage in stages)

    return Costs(
        forward=medians_of_stages("F") or 0,
        input_grad=medians_of_stages("I") or 0,
        weight_grad=medians_of_stages("W") or 0,
        backward=medians_of_stages("B"),
    )
