"""The figures of a run by step, its events and its attempts, in bounded memory.

A job writes figures and events into ``watch-history.json`` (``History``). ``lives.jsonl`` says when
each attempt began and how it ended (``attempts_of``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fleetpipe.errors import ConfigError
from fleetpipe.json_value import JsonValue, Source, read

#: The exit code of a process that Ctrl-C has ended.
INTERRUPTED = 130

#: The history of a job, beside its board.
FILE = "watch-history.json"
#: Rows that are kept; of more, each two become one.
MOST = 600
#: Events that are kept, the newest ones.
MOST_EVENTS = 100
#: The prefix of the names of figures that an evaluation has measured.
EVALUATED = "eval_"

_SOURCE = Source("this is no history of a job", ConfigError, "remove it: the job writes another")


@dataclass
class AttemptRecord:
    """One start of a run.

    Attributes:
        began: Seconds since 1970.
        step: Steps that the run had done before the attempt.
        ended: Seconds since 1970; None if not recorded.
        last_step: The step in which the attempt failed, or the number of steps done or saved at its
            end.
        outcome: How the attempt ended, in words; empty if not recorded.
        details: The last output of the rank that failed.
        failed: Whether some rank failed.
        finished: Whether the training was completed.
    """

    began: float
    step: int
    ended: float | None = None
    last_step: int | None = None
    outcome: str = ""
    details: str = ""
    failed: bool = False
    finished: bool = False


def attempts_of(lines: Iterable[Mapping[str, Any]]) -> list[AttemptRecord]:
    """Returns the attempts recorded in the lines of ``lives.jsonl``, in order.

    Several trainings of one process are one attempt.

    Args:
        lines: The lines, parsed. A line tells of the ``event`` ``begin`` or ``end``; other lines
            are left out.
    """
    attempts: list[AttemptRecord] = []
    # The process of the last attempt, and the attempt's number, "life", as lines have them.
    current: object = None
    for line in lines:
        if line.get("event") == "begin":
            process = (line.get("process"), line.get("life"))
            if process != current or not attempts:
                began, step = (_to_number(line.get(name)) for name in ("time", "step"))
                attempts.append(AttemptRecord(began, int(step)))
            current = process
            attempts[-1].ended = None
        elif line.get("event") == "end" and attempts:
            _record_end(attempts[-1], line)
    return attempts


def _record_end(attempt: AttemptRecord, line: Mapping[str, Any]) -> None:
    """Stores the end of an attempt from its line: exit code, step, and steps saved.

    A run that was asked to stop saves its steps, and has not finished.
    """
    attempt.ended = _to_number(line.get("time"))
    code, saved, step = (line.get(name) for name in ("code", "saved", "step"))
    attempt.finished = code == 0 and saved is None
    interrupted = code == INTERRUPTED
    attempt.failed = not attempt.finished and not interrupted and saved is None
    last = step if saved is None else saved
    attempt.last_step = int(_to_number(last)) if _is_usable_number(last) else None
    if attempt.finished:
        attempt.outcome = "finished"
    elif saved is not None:
        why = "interrupted" if interrupted else "asked to stop"
        attempt.outcome = f"{why}, and saved {attempt.last_step} steps"
    elif interrupted:
        attempt.outcome = "interrupted"
    else:
        attempt.outcome = str(line.get("culprit") or f"ended with {code}")
        attempt.details = str(line.get("details") or "")


def _to_number(value: Any) -> float:
    """Returns a value of JSON as a time or step; 0 if the value cannot be either."""
    return float(value) if _is_usable_number(value) else 0.0


def _is_usable_number(value: Any) -> bool:
    """Returns whether a value of JSON is a number that can be a time or a step."""
    return isinstance(value, (int, float)) and abs(value) < 1e15


class HistoryRow(NamedTuple):
    """The figures of a step, or of the ``stride`` steps of the history that end with the step.

    Attributes:
        step: The step, or the last of the steps.
        figures: By name, the value in the last of the steps that has it (no mean); NaN or an
            infinity if any of the steps has that.
    """

    step: int
    figures: Mapping[str, float]


class RunEvent(NamedTuple):
    """What happened to a run, once or several times in a row.

    Attributes:
        time: Seconds since 1970, at the last time.
        step: Steps that were done by then.
        kind: ``start``, ``restart``, ``healed``, ``save``, ``allowed``, ``warning``, ``slow``,
            ``nan`` or ``mixed``.
        text: What happened, in words.
        since: Steps that were done when the event began, or at the first time.
        times: How many times the event happened.
    """

    time: float
    step: int
    kind: str
    text: str
    since: int
    times: int = 1

    def __str__(self) -> str:
        steps = f"step {self.step:,}"
        if self.since < self.step:
            steps = f"steps {self.since:,} to {self.step:,}"
        return f"{steps}: {self.text}" + (f", {self.times} times" if self.times > 1 else "")


class History:
    """The figures of a run by step: a row for each ``stride`` steps, at most ``MOST`` rows.

    A row has the figures of its last step; NaN or an infinity in any of its steps stays.

    Attributes:
        events: What happened, the newest last.
        stride: How many steps a row stands for; it doubles when there are too many rows.
        last: The last step; 0 if there is none.
    """

    def __init__(
        self, rows: Iterable[HistoryRow] = (), stride: int = 1, events: Iterable[RunEvent] = ()
    ) -> None:
        self.stride, self.last = stride, 0
        self.events: tuple[RunEvent, ...] = tuple(events)[-MOST_EVENTS:]
        #: The figures of a row by its index: of the steps from ``stride * index + 1`` on. A row is
        #: never changed, so that other threads may read it.
        self._rows: dict[int, Mapping[str, float]] = {}
        for row in rows:
            self.add(*row)

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Adds the figures of a step, counted from 1, and drops those of later steps.

        A step that is not the next one is trained again, from a checkpoint.
        """
        index = (max(1, step) - 1) // self.stride
        if step < self.last:
            earlier = {at: row for at, row in self._rows.items() if at < index}
            # Without rows nothing needs the longer stride any more.
            self._rows, self.stride = earlier, self.stride if earlier else 1
            index = (max(1, step) - 1) // self.stride
        self.last = step
        self._rows[index] = _merge_figures(self._rows.get(index, {}), figures)
        if len(self._rows) > MOST:
            halved: dict[int, Mapping[str, float]] = {}
            for at, row in self._rows.items():
                halved[at // 2] = _merge_figures(halved.get(at // 2, {}), row)
            self._rows, self.stride = halved, 2 * self.stride

    def add_event(self, event: RunEvent) -> None:
        """Adds an event.

        If the last event has the same kind and text, it is counted once more instead.
        """
        *earlier, last = self.events or (None,)
        if last is not None and (last.kind, last.text) == (event.kind, event.text):
            times = last.times + event.times
            event = event._replace(since=min(last.since, event.since), times=times)
        elif last is not None:
            earlier.append(last)
        self.events = (*earlier[1 - MOST_EVENTS :], event)

    def rows(self) -> list[HistoryRow]:
        """Returns the rows of figures, each with the last of its steps."""
        ends = ((self.stride * (at + 1), row) for at, row in list(self._rows.items()))
        return [HistoryRow(min(self.last, step), row) for step, row in ends]

    def series(self) -> dict[str, tuple[list[int], list[float]]]:
        """Returns the steps and the values of each figure, by the figure's name, to be drawn.

        A gap is a range of steps without rows (:meth:`gaps`). There each figure has one NaN, at the
        first step of the gap, so that no line is drawn across it.
        """
        series: dict[str, tuple[list[int], list[float]]] = {}
        gaps = self.gaps()
        for step, figures in self.rows():
            for name, value in figures.items():
                steps, values = series.setdefault(name, ([], []))
                if step in gaps and steps:
                    steps.append(gaps[step])
                    values.append(math.nan)
                steps.append(step)
                values.append(value)
        return series

    def gaps(self) -> dict[int, int]:
        """Returns, by the step of the row after a gap, the first missing step of the gap.

        Between two rows there is a gap if they are more than two strides apart.
        """
        pairs = itertools.pairwise([0, *(row.step for row in self.rows())])
        return {
            step: before + self.stride for before, step in pairs if step - before > 2 * self.stride
        }

    def content(self) -> dict[str, Any]:
        """Returns the history as a value for ``json.dumps``, which writes NaN and infinities.

        ``rows`` has pairs of a step and figures by name, ``events`` the fields of :class:`RunEvent`
        as lists.
        """
        rows = [[step, {**row}] for step, row in self.rows()]
        return {"stride": self.stride, "rows": rows, "events": list(map(list, self.events))}

    @classmethod
    def from_json(cls, value: JsonValue) -> History:
        """Reads the history of a run from what :meth:`content` returned.

        Raises:
            ConfigError: The value is no history.
        """
        rows, stride = value["rows"].items(), value["stride"].count()
        if len(rows) > MOST or not stride:
            raise value.refused(f"at most {MOST} rows")
        events = value.get("events")  # missing in those of earlier versions
        return cls(
            (
                row.row(
                    HistoryRow,
                    figures=lambda value: {k: v.number() for k, v in value.fields().items()},
                )
                for row in rows
            ),
            stride,
            () if events is None else (event.row(RunEvent) for event in events.items()),
        )


def _merge_figures(earlier: Mapping[str, float], later: Mapping[str, float]) -> Mapping[str, float]:
    """Returns the figures of two rows of the history that become one.

    A figure is the later row's, unless the earlier row's is NaN or infinite.
    """
    strange = {name: value for name, value in earlier.items() if not math.isfinite(value)}
    return {**earlier, **later, **strange}


def read_history(folder: Path) -> History:
    """Reads the history in a folder; returns an empty one if the file is missing or damaged."""
    with suppress(ConfigError):
        return read(folder / FILE, _SOURCE, History.from_json)
    return History()
