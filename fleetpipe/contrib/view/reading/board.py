"""The state of a job, combined from the records of its ranks, as watchers see it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from fleetpipe.contrib.view.judging.slow_ranks import SlowRank, SlowRanks
from fleetpipe.contrib.view.reading.history import History, read_history
from fleetpipe.contrib.view.showing.numbers import seconds
from fleetpipe.errors import ConfigError
from fleetpipe.job.records import Heard, RankRecord
from fleetpipe.json_value import JsonValue, Source, parse, read

#: The board of a job, in the folder of an attempt and in those of a run.
FILE = "watch.json"
#: A rank that was not heard for so long is called stopped.
SILENT_SECONDS = 0.6
#: A job that was not heard for so many steps has no rate.
_STEPS_OF_SILENCE = 3
#: From this moment on the hour of an end means nothing, and much later ones have none.
_FAR = 1e11
#: Seconds from one board to the next.
PERIOD = 0.2

_SOURCE = Source("this is no board of a job", ConfigError, "watch a job of the same fleetpipe")


@dataclass(frozen=True, order=True)
class LastCheckpoint:
    """The last checkpoint: its step, and the seconds since it was saved."""

    step: int
    age: float


#: What a script gets.
_STATUS = (
    *("step", "steps", "step_time", "samples_per_second", "eta_seconds", "ranks", "slow"),
    *("restarts", "last_checkpoint"),
)
_OF_SLOW = ("rank", "what", "factor")


#: The history of a job that has done no step.
_NONE = History()


@dataclass(frozen=True)
class JobBoard:
    """The state of a job.

    Attributes:
        at: The time of this state, in seconds since 1970.
        step: Steps that are done.
        steps: Steps of the whole run; None if unknown.
        step_time: Seconds of a step.
        samples_per_second: Samples per second of all replicas together.
        ranks: The record of each rank.
        slow: The ranks that are slow.
        restarts: How often the job was restarted.
        last_checkpoint: The last checkpoint; None if none was saved.
        gradient_norm: The norm of the last step before clipping; None if nothing is clipped by it.
        news: What happened to the job, in words; empty if nothing did.
        history: The figures of its steps; a file of its own beside the board's.
    """

    at: float
    step: int = 0
    steps: int | None = None
    step_time: float = 0.0
    samples_per_second: float = 0.0
    ranks: tuple[RankRecord, ...] = ()
    slow: tuple[SlowRank, ...] = ()
    restarts: int = 0
    last_checkpoint: LastCheckpoint | None = None
    gradient_norm: float | None = None
    news: str = ""
    history: History = field(default=_NONE, compare=False, repr=False)

    @property
    def eta_seconds(self) -> float | None:
        """Seconds to the end of the run; None if unknown."""
        if self.steps is None or not self.step_time:
            return None
        left = max(0, self.steps - self.step)
        over = bool(self.ranks) and all(rank.state == "ended" for rank in self.ranks)
        return None if left and over else left * self.step_time

    def content(self) -> dict[str, Any]:
        """Returns the board without its history as a value of JSON."""
        content = asdict(replace(self, history=_NONE))
        del content["history"]
        return content

    def status(self) -> dict[str, Any]:
        """Returns the figures for scripts, under keys that no version changes."""
        content = {**self.content(), "eta_seconds": self.eta_seconds}
        content["slow"] = [{n: one[n] for n in _OF_SLOW} for one in content["slow"]]
        content["ranks"] = [
            {
                **{name: getattr(rank, name) for name in ("rank", "stage", "state", "busy")},
                "memory": rank.memory,
                "last_step_age": rank.step_age,
            }
            for rank in self.ranks
        ]
        return {name: content[name] for name in _STATUS}

    @classmethod
    def of(cls, value: JsonValue) -> JobBoard:
        """Reads a board from a value that :meth:`content` returned.

        Raises:
            ConfigError: The value is no board.
        """
        return value.record(
            cls,
            ranks=lambda ranks: tuple(map(RankRecord.read, ranks.items())),
            slow=lambda slow: tuple(one.record(SlowRank) for one in slow.items()),
            last_checkpoint=lambda saved: saved.record(LastCheckpoint),
            history=History.of,
        )

    def seen_at(self, now: float) -> JobBoard:
        """Returns the board as of ``now``; after a silence its ranks count as stopped."""
        silence = now - self.at
        if silence < SILENT_SECONDS:
            return self
        ranks = tuple(
            replace(
                rank,
                state=rank.state if rank.state == "ended" else "stopped",
                step_age=None if rank.step_age is None else rank.step_age + silence,
            )
            for rank in self.ranks
        )
        saved, over = self.last_checkpoint, all(rank.state == "ended" for rank in ranks)
        aged = None if saved is None else replace(saved, age=saved.age + silence)
        news = self.news if over else f"nothing was heard of the job for {seconds(silence)}"
        now_done = replace(self, ranks=ranks, last_checkpoint=aged, news=news)
        if over or silence < _STEPS_OF_SILENCE * self.step_time:
            return now_done
        return replace(now_done, step_time=0.0, samples_per_second=0.0)


def end_of(board: JobBoard, now: float) -> str:
    """Returns the remaining time of a job and the hour of its end; empty if unknown."""
    left = board.eta_seconds
    if left is None:
        return ""
    if now + left > _FAR:
        return seconds(left)
    return f"{seconds(left)}, until {time.strftime('%H:%M %Z', time.localtime(now + left))}"


def checkpoint_of(board: JobBoard) -> str:
    """Says which step was saved last, and how long ago."""
    saved = board.last_checkpoint
    return "none" if saved is None else f"step {saved.step:,}, {seconds(saved.age)} ago"


def read_board(path: Path) -> JobBoard:
    """Reads the file of a board, and the history beside it.

    Raises:
        ConfigError: The file is missing, or is no board.
    """
    return replace(read(path, _SOURCE, JobBoard.of), history=read_history(path.parent))


def board_of(text: str | bytes) -> JobBoard:
    """Reads the text of a board; raises the errors of :func:`read_board`."""
    return JobBoard.of(parse(text, _SOURCE))


class Boards:
    """Makes one board after another, and finds slow ranks from their steps."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[tuple[int, ...], int]] = {}
        self._slow: SlowRanks | None = None

    def next(self, heard: Mapping[int, Heard], now: float) -> JobBoard:
        """Returns the state of the job.

        Args:
            heard: The last record of each rank, with the rows that came since the last board.
            now: Seconds since 1970.
        """
        records = {rank: one.record for rank, one in heard.items()}
        first = records[min(records)]
        saved = max(
            (LastCheckpoint(one.saved, one.saved_age) for one in records.values()
             if one.saved is not None and one.saved_age is not None),
            default=None,
        )  # fmt: skip
        times = [one.step_time for one in records.values() if one.step_time]
        step_time = median(times) if times else 0.0
        return JobBoard(
            at=now,
            step=min(one.step for one in records.values()),
            steps=first.steps,
            step_time=step_time,
            samples_per_second=first.samples / step_time if step_time else 0.0,
            ranks=tuple(_state(heard[rank]) for rank in sorted(heard)),
            slow=tuple(self._name_slow(records)),
            last_checkpoint=saved,
            gradient_norm=first.gradient_norm,
        )

    def _name_slow(self, records: Mapping[int, RankRecord]) -> list[SlowRank]:
        if len(records) == 1:
            return []  # slower than which other?
        places = {rank: (one.stages, one.shard) for rank, one in records.items()}
        if self._slow is None or places != self._places:
            self._places, self._slow = places, SlowRanks(places)
        return self._slow.add({rank: one.rows for rank, one in records.items()})


def _state(heard: Heard) -> RankRecord:
    record = heard.record
    state = "running"
    if heard.left:
        state = "ended"
    elif heard.silence > SILENT_SECONDS:
        state = "stopped"
    elif record.step_age is None:
        state = "starting"
    elif record.awaited is not None:
        state = "waiting"
    age = None if record.step_age is None else record.step_age + heard.silence
    return replace(record, rows=(), state=state, step_age=age)
