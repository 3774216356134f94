"""The progress of this process in its run and its step times, of which records are made."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any

from fleetpipe.job import attempt_files
from fleetpipe.job.records import BETWEEN, MOST_ROWS, PARTS, RankRecord, StepRow
from fleetpipe.job.watching.calls import CollectiveCalls
from fleetpipe.systems import ProcessorQueue

#: Steps whose figures are those of the present.
_STEPS = 10
#: A run of more steps is one without an end.
_MOST_STEPS = 1 << 40
#: Seconds between two looks at a figure that is on a card.
_CARD_SECONDS = 1.0


#: What a step took: ``cpu``, ``wall``, ``data`` and saving, ``limited``, awaited, ``probe``.
StepTimes = tuple[float, float, float, float, dict[int, int], float]


class WallTime:
    """Adds up what the wall time of a process is spent on.

    What passes between two steps is ``other`` unless somebody names it by :meth:`spending`.

    Attributes:
        part: What the process spends its time on at this moment; empty in steps, and in ``other``.
        between: Seconds between the last step and the one before, by the names of ``BETWEEN``.
        recent: Seconds on each of ``PARTS`` in the last steps.
        seconds: Seconds on each of ``PARTS`` since the end of the first step.
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
        #: Seconds since the last step that :meth:`spending` has named.
        self._named = dict.fromkeys(BETWEEN, 0.0)
        #: Seconds of waits within those, which do not count as waits a second time.
        self._waits_in_named = 0.0
        #: The clock, and the seconds of all waits so far, at the begin and the end of a step.
        self._begun = self._ended = (0.0, 0.0)
        self._steps = 0
        self._measured = False
        self._sample: list[float] = []

    @contextmanager
    def spending(self, part: str) -> Iterator[None]:
        """While it is open, time is spent on a part; a save within another part is a save."""
        around = self.part
        if around and part != "saves":
            yield
            return
        begin, waited, saved = time.monotonic(), self._waited(), self._named["saves"]
        self.part = part
        try:
            yield
        finally:
            self.part = around
            self._named[part] += time.monotonic() - begin - (self._named["saves"] - saved)
            if not around:
                self._waits_in_named += self._waited() - waited

    def begin_step(self) -> None:
        """Begins a step."""
        self._begun = time.monotonic(), self._waited()
        if self._steps:
            passed, waits = (now - before for now, before in zip(self._begun, self._ended))
            named = sum(self._named.values()) - self._waits_in_named
            self.between = {**self._named, "other": max(0.0, passed - waits - named)}

    def end_step(self, measured: bool = True) -> None:
        """Ends a step.

        Args:
            measured: Whether the device has computed the step by now. If it has not, the wall time
                of this step and of the time after it is divided in the shares of measured steps.
        """
        now = time.monotonic(), self._waited()
        took, waits = (end - begin for end, begin in zip(now, self._begun))
        if measured:
            self._sample[:2] = max(0.0, took - waits), waits
        if self._measured:
            self._sample[2:] = [self.between["other"]]
        if self._steps:
            passed, waits = (end - before for end, before in zip(now, self._ended))
            waits = max(0.0, waits - self._waits_in_named)
            rest = passed - sum(self.between.values()) - waits
            spent = [max(0.0, rest), waits, self.between["other"]]
            if sum(self._sample) and not (measured and self._measured):
                spent = [sum(spent) * part / sum(self._sample) for part in self._sample]
            compute, waiting, *other = spent
            self.recent.append((compute, waiting, *[*self.between.values()][:-1], sum(other)))
            self.seconds = tuple(map(float.__add__, self.seconds, self.recent[-1]))
        self._ended, self._measured = now, measured
        self._named, self._waits_in_named = dict.fromkeys(BETWEEN, 0.0), 0.0
        self._steps += 1


class RunProgress:
    """Counts and times the steps of one process. The main thread writes it, another one reads.

    Attributes:
        action: Describes the present operation; called on any thread.
        awaited: Returns the rank for whose message it waits; None if it does not wait.
        waited: Returns the seconds for which it has waited for messages.
        flights: Returns by rank the shortest time that a message took since the last call.
        queues: Returns the number of untaken messages and of unsent bytes.
        memory: Returns how many bytes it holds.
        synchronize: Waits until its device has computed all queued work, within a limit.
        memory_limit: Bytes that it may hold.
        gradient_norm: Returns the gradient norm of the last step; None if it is not known.
        figures: Gets each step with its figures by name; None where nobody takes them away.
        events: Gets what happens to the run, as a kind and a text; None as for figures.
        folders: The folders in which the run is recorded.
        calls: The collective calls that it has begun.
        wall_time: Where its time goes.
        stages, replica, shard, samples, held, held_cap, step, steps: See :class:`RankRecord`.
    """

    def __init__(self) -> None:
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
        self._losses: dict[str, float] = {}
        self._due: dict[str, float] = {}
        self.folders: list[Path] = []
        self.calls = CollectiveCalls()
        self.wall_time = WallTime(self._waited_seconds)
        self.stages: tuple[int, ...] = ()
        self.replica = self.shard = self.samples = self.held = self.step = 0
        self.steps: int | None = None
        self.held_cap: int | None = None
        self._done = 0
        self._write_done = attempt_files.page(attempt_files.DONE)
        self._ended: float | None = None
        self._queue: ProcessorQueue | None = None
        self._save = 0.0
        self._saved: tuple[int, float] | None = None
        self._last: deque[StepRow] = deque(maxlen=_STEPS)
        self._rows: deque[StepRow] = deque(maxlen=MOST_ROWS)

    def _waited_seconds(self) -> float:
        return self.waited()

    def expect(self, step: int, steps: int | None) -> None:
        """Sets how many steps the run has done already, and how many it has in all, if it ends."""
        self.step = step
        self.steps = steps if steps is not None and steps < _MOST_STEPS else None

    def tell_norm(self, read: Callable[[], float | None], waits: bool) -> None:
        """Sets the function that reads the gradient norm of the last step.

        Args:
            read: Returns it.
            waits: Whether it waits for a card. The watch's thread must not wait, so that this
                thread then reads the norm now and then.
        """
        if not waits:
            self.gradient_norm = read
        elif self._is_due("norm"):
            norm = read()
            self.gradient_norm = lambda: norm

    def tell_loss(self, loss: Any, waits: bool) -> None:
        """Stores the loss of the step that ends next, a Tensor of one number or a list of them.

        Args:
            loss: The loss; another kind of value is left out.
            waits: Whether reading it waits for a card: it is then read now and then.
        """
        if self.figures is not None and (not waits or self._is_due("loss")):
            losses = loss if isinstance(loss, list) else [loss]
            names = [f"loss {n}" for n in range(len(losses))] if len(losses) > 1 else ["loss"]
            single = all(getattr(one, "shape", None) in ([], [1]) for one in losses)
            self._losses = {n: float(one.item()) for n, one in zip(names, losses)} if single else {}

    def note(self, figures: Mapping[str, float]) -> None:
        """Adds figures of the last step, such as metrics, to those that a board shows."""
        if self.figures is not None:
            self.figures.append((self.step, figures))

    def note_event(self, kind: str, text: str) -> None:
        """Adds something that happened, such as a healing, to what a board shows."""
        if self.events is not None:
            self.events.append((kind, text))

    def _is_due(self, name: str) -> bool:
        now = time.monotonic()
        due = now >= self._due.get(name, 0.0)
        if due:
            self._due[name] = now + _CARD_SECONDS
        return due

    def begin_step(self) -> None:
        """Begins a step; forgets times of earlier messages, which may be an evaluation's."""
        self.flights()
        self.wall_time.begin_step()

    def end_step(self, times: StepTimes) -> None:
        """Counts a step; the time since the one before counts as its data."""
        cpu, wall, passed, limited, awaited, probe = times
        flights = tuple(
            number
            for peer, flight in self.flights().items()
            for number in (peer, flight, awaited.get(peer, 0))
        )
        data = max(0.0, passed - self._save)
        now = time.monotonic()
        # Not each step is measured, on a GPU.
        self.wall_time.end_step(measured=wall > 0)
        figures, self._losses = self._losses, {}
        if self._ended is not None:
            span = now - self._ended
            figures["step time"] = span
            row = StepRow(self.step, span, cpu, wall, data, self._save, limited, flights, probe)
            self._last.append(row)
            self._rows.append(row)
        self._ended, self._save = now, 0.0
        self.step += 1
        self._done += 1
        self._write_done(self._done)
        self.note(figures)

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Times the save of a step while it is open; a wait for the GPU does not count."""
        self.synchronize()
        self._queue = self._queue or ProcessorQueue()
        begin, queued = time.monotonic(), self._queue.seconds()
        with self.wall_time.spending("saves"):
            yield
        end = time.monotonic()
        # What others had of the processor is no part of a step's data, from which this is taken.
        self._save += max(0.0, end - begin - (self._queue.seconds() - queued))
        self._saved = step, end

    def record(self, rank: int, action: str, with_rows: bool) -> RankRecord:
        """Returns the present record of the process, and forgets the rows that are in it."""
        # Each once, and before the clock: the main thread goes on meanwhile, and no age is below 0.
        ended, saved, spans = self._ended, self._saved, [row.span for row in [*self._last]]
        recent = [*self.wall_time.recent]
        now = time.monotonic()
        passed = sum(map(sum, recent))
        rows: tuple[StepRow, ...] = ()
        if with_rows:
            rows = tuple(self._rows.popleft() for _ in range(len(self._rows)))
        incoming, outgoing = self.queues()
        norm = self.gradient_norm()
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
            gradient_norm=norm,
            incoming=incoming,
            outgoing=outgoing,
            saved=None if saved is None else saved[0],
            saved_age=None if saved is None else now - saved[1],
            rows=rows,
            part=self.wall_time.part,
        )
