"""Measures a rank's progress and times, for the records that ranks send each other.

Five times a second a rank sends a record (``RankRecord``) with its progress and step times, which
``RunProgress`` and ``WallTime`` measure. With it goes the last of its collective calls
(``CollectiveCalls``), which all ranks must begin in one order; the header of each message between
ranks has the kind of that call too.
"""

from __future__ import annotations

import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from fleetpipe.errors import ConfigError
from fleetpipe.job import attempt_files
from fleetpipe.json_value import JsonValue, Source
from fleetpipe.systems import ProcessorQueue

#: Past calls that are stored for comparison: more than a rank can be behind another one.
_MOST_CALLS = 512
#: Packages whose stack frames are not the script's.
_NOT_THE_SCRIPTS = {"fleetpipe", "paddle", "contextlib", "decorator", "functools"}

#: Most steps in one record: where steps are very short, it has the last ones only.
MOST_ROWS = 16
#: A record of a higher rank is invalid.
_MOST_RANKS = 1 << 20
#: The parts of the time between two steps.
BETWEEN = ("data", "callbacks", "evaluation", "saves", "other")
#: The parts of wall time: in a step a rank computes, or waits for other ranks.
PARTS = ("compute", "waiting", *BETWEEN)

#: How errors about a record from elsewhere are worded.
SOURCE = Source("this is no record of a rank", ConfigError, "give all ranks the same fleetpipe")

#: The number of last steps over which a record's mean times are taken.
_STEPS = 10
#: A run of more steps counts as one without an end.
_MOST_STEPS = 1 << 40
#: Seconds between two reads of a number that is in a GPU's memory.
_GPU_READ_SECONDS = 1.0

#: Times of a step: ``cpu`` and ``wall`` as in :class:`StepRow`; the seconds from the step before to
#: the first action, which are ``data`` and ``save`` together; ``limited``; by rank, the number of
#: its messages that this rank waited for; ``probe``.
StepTimes = tuple[float, float, float, float, dict[int, int], float]


class CollectiveCall(NamedTuple):
    """A call that several ranks must begin in the same order, such as that of a training batch.

    Attributes:
        number: The call's number among those of one replica, from 1.
        of_job: The call's number among those that all replicas begin; 0 if only some begin it.
        kind: A text that is the same on all ranks that begin the call.
        words: What the rank does, and the line of the script.
    """

    number: int = 0
    of_job: int = 0
    kind: str = ""
    words: str = ""


class CollectiveCalls:
    """The last collective calls of this process.

    The main thread begins them, and the watch's thread compares them with those of other ranks.

    Attributes:
        replica: The ranks of this process's replica.
    """

    def __init__(self) -> None:
        """Begins without a call; the replica is set later."""
        self.replica: frozenset[int] = frozenset()
        self._calls = deque([CollectiveCall()], _MOST_CALLS)
        self._of_job = 0

    @property
    def last(self) -> CollectiveCall:
        """The last call that has begun; an empty one before the first."""
        return self._calls[-1]

    def begin(self, words: str, kind: str = "", replicas: bool = True) -> int:
        """Begins a call.

        Args:
            words: What this rank does, such as ``trains a batch``.
            kind: A text that is the same on all ranks; by default the words.
            replicas: Whether all replicas begin the call, not only this one.

        Returns:
            A number that stands for the kind, for the headers of messages.
        """
        self._of_job += replicas
        words, kind = f"{words} ({line_of_the_script()})", kind or words
        number = self.last.number + 1
        self._calls.append(CollectiveCall(number, self._of_job if replicas else 0, kind, words))
        return zlib.crc32(kind.encode())

    def mismatch(self, other: CollectiveCall, same_replica: bool) -> CollectiveCall | None:
        """Compares another rank's call with this process's call of the same number.

        Args:
            other: The last call of the other rank.
            same_replica: Whether that rank is of this one's replica.

        Returns:
            This process's call, if it is of another kind than ``other``; None if it is of the same
            kind, or not known.
        """
        number_of = attrgetter("number" if same_replica else "of_job")
        # A copy: the main thread may add a call meanwhile.
        calls = [call for call in [*self._calls] if number_of(call) == number_of(other) > 0]
        return calls[0] if calls and calls[0].kind != other.kind else None


def line_of_the_script() -> str:
    """Returns the file and the line of the script that called into fleetpipe, in words."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] not in _NOT_THE_SCRIPTS:
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}, line {frame.f_lineno}"


class StepRow(NamedTuple):
    """The times of the parts of a step on one rank, in seconds; 0 if not measured.

    Attributes:
        step: Number of the step, from 0.
        span: Time from the end of the step before to the end of this one.
        cpu: Processor time of the rank's actions in the step.
        wall: Elapsed time of these actions, without waits for messages and for a processor.
        data: Time from the step before to the first action, without saving and waits for a
            processor.
        save: Time of saving since the step before.
        limited: Time in which the container's limit kept the process from running.
        flights: Three numbers for each rank that sent messages: the rank, the shortest time in
            seconds from sending to arrival (by both clocks, which may differ), and how many of the
            messages this rank waited for.
        probe: Processor time of a small piece of work that is always the same; 0 if not measured.
    """

    step: int
    span: float
    cpu: float
    wall: float
    data: float
    save: float
    limited: float = 0.0
    flights: tuple[float, ...] = ()
    probe: float = 0.0


@dataclass(frozen=True)
class RankRecord:
    """The state and progress of one rank at one moment.

    Attributes:
        rank: Its rank in the job.
        action: Its present operation, in words.
        stages: The stages that it runs; none before a model is wrapped.
        replica: The number of its replica.
        shard: Its index among the ranks that share its layers.
        awaited: The rank for whose message it waits; None if it does not wait.
        step: Steps that are done, in all attempts.
        steps: Steps of the whole run; None if unknown.
        step_age: Seconds since the last step was done; None before the first.
        step_time: Seconds of a step: the mean of the last ones.
        usual_step: Seconds of a step: the median of the last ones.
        busy: The share of the time of the last steps in which it computed.
        spent: Seconds on each of ``PARTS`` since its first step.
        samples: Rows of a step, of all replicas.
        memory: Bytes that the process holds.
        memory_limit: Bytes that it may hold; None if unknown.
        held: The most forwards whose activations it held at once in the last step.
        held_cap: The ``memory_cap`` of its schedule, if that counts forwards.
        gradient_norm: Gradient norm of the last step before clipping, NaN and infinities included;
            None without such a clip.
        incoming: Number of arrived messages that it has not taken.
        outgoing: Bytes that wait to be sent.
        saved: The last step that was saved; None without one.
        saved_age: Seconds since that save; None without one.
        rows: The times of the steps that were done since the last record.
        state: On a board: ``starting``, ``running``, ``waiting``, ``stopped`` or ``ended``.
        part: The part of ``BETWEEN`` that it is in; empty in steps, and in "other".
    """

    rank: int
    action: str
    stages: tuple[int, ...] = ()
    replica: int = 0
    shard: int = 0
    awaited: int | None = None
    step: int = 0
    steps: int | None = None
    step_age: float | None = None
    step_time: float = 0.0
    usual_step: float = 0.0
    busy: float = 0.0
    spent: tuple[float, ...] = ()
    samples: int = 0
    memory: int = 0
    memory_limit: int | None = None
    held: int = 0
    held_cap: int | None = None
    gradient_norm: float | None = None
    incoming: int = 0
    outgoing: int = 0
    saved: int | None = None
    saved_age: float | None = None
    rows: tuple[StepRow, ...] = ()
    state: str = "starting"
    part: str = ""

    @property
    def stage(self) -> int | None:
        """The first of its stages; None before a model is wrapped."""
        return min(self.stages, default=None)

    @property
    def doing(self) -> str:
        """The rank's present operation, or the part of the time between steps, in words."""
        return f"{self.part}, after {self.action}" if self.part else self.action

    @property
    def lean(self) -> RankRecord:
        """This record without its ``rows``."""
        return replace(self, rows=())

    def content(self) -> dict[str, Any]:
        """Returns the record as a JSON value, with times in seconds to the nanosecond."""
        return {field.name: _round_floats(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def of(cls, content: object) -> RankRecord:
        """Reads the result of :meth:`content`, which may come from another program.

        Raises:
            ConfigError: The value is not a record.
        """
        return cls.read(JsonValue(content, SOURCE))

    @classmethod
    def read(cls, value: JsonValue) -> RankRecord:
        """Reads a record from a JSON value.

        Raises:
            FleetPipeError: The value is not a record; the class is that of ``value.source``.
        """
        record = value.record(cls, rows=_read_rows, gradient_norm=JsonValue.number)
        if (
            record.rank >= _MOST_RANKS
            or len(record.rows) > MOST_ROWS
            or len(record.spent) > len(PARTS)
        ):
            raise value.refused("a record of one rank")
        return record


def _round_floats(value: Any) -> Any:
    """Returns a value of a record with tuples as lists, and floats with 9 decimals."""
    if isinstance(value, tuple):
        return [_round_floats(item) for item in value]
    return round(value, 9) if isinstance(value, float) else value


def _read_rows(value: JsonValue) -> tuple[StepRow, ...]:
    """Reads the times of a record's steps from a JSON value."""
    return tuple(item.row(StepRow, flights=JsonValue.differences) for item in value.items())


class LastRecord(NamedTuple):
    """The last record that a process has received from one rank of the job.

    Attributes:
        record: The rank's last record.
        silence: Seconds since the rank's last message.
        left: Whether the rank has left the job.
    """

    record: RankRecord
    silence: float = 0.0
    left: bool = False


class WallTime:
    """Adds up the wall time of a process by the parts that it is spent on.

    Time between two steps counts as ``other`` unless it is spent within :meth:`spending`.

    Attributes:
        part: The part that the process is in now; empty in steps, and in ``other``.
        between: Seconds between the last step and the one before, by the names of ``BETWEEN``.
        recent: For each of the last steps, the seconds on each of ``PARTS``, in that order.
        seconds: Seconds on each of ``PARTS``, in that order, since the end of the first step.
    """

    def __init__(self, waited: Callable[[], float]) -> None:
        """Begins without any step.

        Args:
            waited: Returns the seconds for which the process has waited for messages of others.
        """
        self.part = ""
        self.between: Mapping[str, float] = dict.fromkeys(BETWEEN, 0.0)
        self.recent: deque[tuple[float, ...]] = deque(maxlen=_STEPS)
        self.seconds = (0.0,) * len(PARTS)
        self._waited = waited
        #: Seconds since the last step that :meth:`spending` has counted, by part.
        self._counted = dict.fromkeys(BETWEEN, 0.0)
        #: Seconds of waits for messages within the counted times, so that no wait counts twice.
        self._waits_in_counted = 0.0
        #: The clock, and the seconds of all waits so far, at the begin and the end of a step.
        self._begun = self._ended = (0.0, 0.0)
        self._steps = 0
        self._measured = False
        #: Seconds of computing, of waiting and of "other" in the last measured step and after it:
        #: the proportions for steps that are not measured.
        self._shares: list[float] = []

    @contextmanager
    def spending(self, part: str) -> Iterator[None]:
        """Counts the time within the context for a part of ``BETWEEN``.

        Within another part only a save is counted, as a save.
        """
        outer = self.part
        if outer and part != "saves":
            yield
            return
        begin, waited, saved = time.monotonic(), self._waited(), self._counted["saves"]
        self.part = part
        try:
            yield
        finally:
            self.part = outer
            self._counted[part] += time.monotonic() - begin - (self._counted["saves"] - saved)
            if not outer:
                self._waits_in_counted += self._waited() - waited

    def begin_step(self) -> None:
        """Begins a step, and sets ``between``: the seconds since the last step ended, by part."""
        self._begun = time.monotonic(), self._waited()
        if self._steps:
            passed, waits = (now - before for now, before in zip(self._begun, self._ended))
            counted = sum(self._counted.values()) - self._waits_in_counted
            self.between = {**self._counted, "other": max(0.0, passed - waits - counted)}

    def end_step(self, measured: bool = True) -> None:
        """Ends a step.

        Args:
            measured: Whether the device has computed the step by now. If not, this step's time
                and the time after it are divided in the proportions of measured steps.
        """
        now = time.monotonic(), self._waited()
        took, waits = (end - begin for end, begin in zip(now, self._begun))
        if measured:
            self._shares[:2] = max(0.0, took - waits), waits
        if self._measured:
            self._shares[2:] = [self.between["other"]]
        if self._steps:
            passed, waits = (end - before for end, before in zip(now, self._ended))
            waits = max(0.0, waits - self._waits_in_counted)
            computed = passed - sum(self.between.values()) - waits
            spent = [max(0.0, computed), waits, self.between["other"]]
            if sum(self._shares) and not (measured and self._measured):
                spent = [sum(spent) * part / sum(self._shares) for part in self._shares]
            compute, waiting, *other = spent
            self.recent.append((compute, waiting, *[*self.between.values()][:-1], sum(other)))
            self.seconds = tuple(map(float.__add__, self.seconds, self.recent[-1]))
        self._ended, self._measured = now, measured
        self._counted, self._waits_in_counted = dict.fromkeys(BETWEEN, 0.0), 0.0
        self._steps += 1


class RunProgress:
    """Counts and times the steps of one process. The main thread writes it, another one reads.

    Attributes:
        action: Returns the present operation in words; called on any thread.
        awaited: Returns the rank for whose message the process waits; None if it does not wait.
        waited: Returns the seconds for which the process has waited for messages so far.
        flights: Returns by rank the shortest seconds that a message took since the last call.
        queues: Returns the numbers of untaken messages and of unsent bytes.
        memory: Returns how many bytes the process holds.
        synchronize: Waits until its device has computed all queued work, within a limit.
        memory_limit: Bytes that the process may hold.
        gradient_norm: Returns the gradient norm of the last step; None if it is not known.
        figures: Receives each step with its figures by name; None if nobody reads them.
        events: Receives events of the run, as a kind and a text; None if nobody reads them.
        folders: The folders in which the run is recorded.
        calls: The collective calls that the process has begun.
        wall_time: Adds up the process's wall time by ``PARTS``: computing, waiting, saves ..
        stages: The stages that the process runs; none before a model is wrapped.
        replica: The number of its replica.
        shard: Its index among the ranks that share its layers.
        samples: Rows of a step, of all replicas.
        held: The most forwards whose activations it held at once in the last step.
        held_cap: The ``memory_cap`` of its schedule, if that counts forwards; else None.
        step: Steps that are done, in all attempts.
        steps: Steps of the whole run; None if unknown.
    """

    def __init__(self) -> None:
        """Begins without any step; the job replaces the functions by its own."""
        self.action: Callable[[], str] = lambda: "outside of the pipeline"
        self.awaited: Callable[[], int | None] = lambda: None
        self.waited: Callable[[], float] = float
        self.flights: Callable[[], dict[int, float]] = dict
        self.queues: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self.memory: Callable[[], int] = lambda: 0
        self.synchronize: Callable[[], None] = lambda: None
        self.memory_limit = sys.maxsize
        self.gradient_norm: Callable[[], float | None] = lambda: None
        self.figures: deque[tuple[int, Mapping[str, float]]] | None = None
        self.events: deque[tuple[str, str]] | None = None
        #: The loss of the step that ends next, by name.
        self._losses: dict[str, float] = {}
        #: When each value whose reading waits for a GPU ("norm", "loss") may be read again.
        self._due: dict[str, float] = {}
        self.folders: list[Path] = []
        self.calls = CollectiveCalls()
        self.wall_time = WallTime(lambda: self.waited())  # noqa: PLW0108 - waited is replaced
        self.stages: tuple[int, ...] = ()
        self.replica = self.shard = self.samples = self.held = self.step = 0
        self.steps: int | None = None
        self.held_cap: int | None = None
        #: Steps done in this attempt, and the function that writes their number.
        self._done = 0
        self._write_done = attempt_files.step_counter(attempt_files.DONE)
        #: When the last step ended, and the seconds of saves since then.
        self._ended: float | None = None
        self._save_seconds = 0.0
        #: The last saved step, and when its save ended.
        self._saved: tuple[int, float] | None = None
        #: Counts the seconds for which the main thread waited for a processor; made in a save.
        self._queue: ProcessorQueue | None = None
        #: The last steps, for means over them, and the steps that no record has had yet.
        self._last: deque[StepRow] = deque(maxlen=_STEPS)
        self._rows: deque[StepRow] = deque(maxlen=MOST_ROWS)

    def expect(self, step: int, steps: int | None) -> None:
        """Sets how many steps are done and how many the run has.

        Args:
            step: Steps that are done already, in earlier attempts.
            steps: Steps of the whole run; None, or a very large number, if it has no end.
        """
        self.step = step
        self.steps = steps if steps is not None and steps < _MOST_STEPS else None

    def tell_norm(self, read: Callable[[], float | None], waits: bool) -> None:
        """Sets the function that reads the gradient norm of the last step.

        Args:
            read: Returns the norm; None if it is not known.
            waits: Whether reading waits for a GPU. The watch's thread must not wait: this thread
                then reads the norm, at most once in ``_GPU_READ_SECONDS``.
        """
        if not waits:
            self.gradient_norm = read
        elif self._begin_read_if_due("norm"):
            norm = read()
            self.gradient_norm = lambda: norm

    def tell_loss(self, loss: Any, waits: bool) -> None:
        """Stores the loss of the step that ends next, a Tensor of one number or a list of them.

        Args:
            loss: The loss; another kind of value is ignored.
            waits: Whether reading it waits for a GPU: it is then read at most once in
                ``_GPU_READ_SECONDS``.
        """
        if self.figures is not None and (not waits or self._begin_read_if_due("loss")):
            losses = loss if isinstance(loss, list) else [loss]
            names = [f"loss {n}" for n in range(len(losses))] if len(losses) > 1 else ["loss"]
            self._losses = {}
            if all(getattr(value, "shape", None) in ([], [1]) for value in losses):
                self._losses = {n: float(value.item()) for n, value in zip(names, losses)}

    def note(self, figures: Mapping[str, float]) -> None:
        """Adds figures of the last step, such as metrics, to the ``figures`` that a board reads."""
        if self.figures is not None:
            self.figures.append((self.step, figures))

    def note_event(self, kind: str, text: str) -> None:
        """Adds an event, such as a healing, to the ``events`` that a board reads."""
        if self.events is not None:
            self.events.append((kind, text))

    def _begin_read_if_due(self, name: str) -> bool:
        """Returns whether the "norm" or the "loss" may be read from the GPU now; notes a read.

        That is so ``_GPU_READ_SECONDS`` after the last read.
        """
        now = time.monotonic()
        due = now >= self._due.get(name, 0.0)
        if due:
            self._due[name] = now + _GPU_READ_SECONDS
        return due

    def begin_step(self) -> None:
        """Begins a step, and drops the times of earlier messages, which may be an evaluation's."""
        self.flights()
        self.wall_time.begin_step()

    def end_step(self, times: StepTimes) -> None:
        """Ends a step and stores its times.

        Args:
            times: The times; the time since the step before counts as the step's data.
        """
        cpu, wall, passed, limited, awaited, probe = times
        flights: list[float] = []
        for peer, flight in self.flights().items():
            flights += (peer, flight, awaited.get(peer, 0))
        data = max(0.0, passed - self._save_seconds)
        now = time.monotonic()
        # Not each step is measured, on a GPU.
        self.wall_time.end_step(measured=wall > 0)
        figures, self._losses = self._losses, {}
        if self._ended is not None:
            span = now - self._ended
            figures["step time"] = span
            times_of_parts = (span, cpu, wall, data, self._save_seconds, limited)
            row = StepRow(self.step, *times_of_parts, tuple(flights), probe)
            self._last.append(row)
            self._rows.append(row)
        self._ended, self._save_seconds = now, 0.0
        self.step += 1
        self._done += 1
        self._write_done(self._done)
        self.note(figures)

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Counts the time within the context as that of saving step ``step``.

        It first waits for the GPU; this wait does not count.
        """
        self.synchronize()
        self._queue = self._queue or ProcessorQueue()
        begin, queued = time.monotonic(), self._queue.seconds()
        with self.wall_time.spending("saves"):
            yield
        end = time.monotonic()
        # Without waits for a processor: end_step subtracts it from a time that has none.
        self._save_seconds += max(0.0, end - begin - (self._queue.seconds() - queued))
        self._saved = step, end

    def record(self, rank: int, action: str, with_rows: bool) -> RankRecord:
        """Returns the present record of the process; may be called on any thread.

        Args:
            rank: This process's rank.
            action: The present operation, in words.
            with_rows: Whether to move the stored steps into the record.
        """
        # Read once, before the clock: the main thread changes them, and no age may be below 0.
        ended, saved, spans = self._ended, self._saved, [row.span for row in [*self._last]]
        recent = [*self.wall_time.recent]
        now = time.monotonic()
        passed = sum(map(sum, recent))
        rows: tuple[StepRow, ...] = ()
        if with_rows:
            rows = tuple(self._rows.popleft() for _ in range(len(self._rows)))
        incoming, outgoing = self.queues()
        return RankRecord(
            rank,
            action,
            stages=self.stages,
            replica=self.replica,
            shard=self.shard,
            awaited=self.awaited(),
            step=self.step,
            steps=self.steps,
            step_age=None if ended is None else now - ended,
            step_time=fmean(spans) if spans else 0.0,
            usual_step=median(spans) if spans else 0.0,
            busy=sum(step[0] for step in recent) / passed if passed else 0.0,
            spent=self.wall_time.seconds,
            samples=self.samples,
            memory=self.memory(),
            memory_limit=None if self.memory_limit == sys.maxsize else self.memory_limit,
            held=self.held,
            held_cap=self.held_cap,
            gradient_norm=self.gradient_norm(),
            incoming=incoming,
            outgoing=outgoing,
            saved=None if saved is None else saved[0],
            saved_age=None if saved is None else now - saved[1],
            rows=rows,
            part=self.wall_time.part,
        )
