"""The state of a job, put together from what its ranks tell: what whoever watches it is shown."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from fleetpipe.contrib.report.numbers import seconds
from fleetpipe.contrib.watch.slow_ranks import SlowRank, SlowRanks
from fleetpipe.errors import ConfigError
from fleetpipe.job.records import Heard, RankRecord
from fleetpipe.json_value import JsonValue, Source, parse, read

#: The board of a job, in the folder of an attempt and in those of a run.
FILE = "watch.json"
#: A rank that was not heard for so long is called stopped.
SILENT_SECONDS = 0.6
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


@dataclass(frozen=True)
class JobBoard:
    """The state of a job.

    Attributes:
        at: When it was so, in seconds since 1970.
        step: Steps that are done.
        steps: Steps of the whole run; None where nobody says.
        step_time: Seconds of a step.
        samples_per_second: Of all replicas.
        ranks: How each gets on.
        slow: Who is slow.
        restarts: How often the job was started again.
        last_checkpoint: The last that was saved; None where none was.
        gradient_norm: Of the last step, before clipping; None where nothing is clipped by it.
        news: What became of the job, where that is to be said.
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

    @property
    def eta_seconds(self) -> float | None:
        """Seconds to the end of the run; None where nobody knows."""
        if self.steps is None or not self.step_time:
            return None
        return max(0, self.steps - self.step) * self.step_time

    def content(self) -> dict[str, Any]:
        """Returns all of it as a value of JSON."""
        return asdict(self)

    def status(self) -> dict[str, Any]:
        """Returns what scripts get, under keys that stay as they are."""
        content = {**asdict(self), "eta_seconds": self.eta_seconds}
        content["slow"] = [*content["slow"]]
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
        """Reads what :meth:`content` returned.

        Raises:
            ConfigError: It is something else.
        """
        return value.record(
            cls,
            ranks=lambda ranks: tuple(map(RankRecord.read, ranks.items())),
            slow=lambda slow: tuple(one.record(SlowRank) for one in slow.items()),
            last_checkpoint=lambda saved: saved.record(LastCheckpoint),
        )

    def seen_at(self, now: float) -> JobBoard:
        """Returns it as it is a while later, where nothing has been heard since."""
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
        saved = self.last_checkpoint
        aged = None if saved is None else replace(saved, age=saved.age + silence)
        over = not ranks or all(rank.state == "ended" for rank in ranks)
        news = self.news if over else f"nothing was heard of the job for {seconds(silence)}"
        return replace(self, ranks=ranks, last_checkpoint=aged, news=news)


def end_of(board: JobBoard, now: float) -> str:
    """Returns how long a job still takes, and when that is by this host's clock; or nothing."""
    left = board.eta_seconds
    if left is None:
        return ""
    return f"{seconds(left)}, until {time.strftime('%H:%M %Z', time.localtime(now + left))}"


def checkpoint_of(board: JobBoard) -> str:
    """Returns which step was saved last, and when."""
    saved = board.last_checkpoint
    return "none" if saved is None else f"step {saved.step:,}, {seconds(saved.age)} ago"


def read_board(path: Path) -> JobBoard:
    """Reads the file of a board.

    Raises:
        ConfigError: There is none.
    """
    return read(path, _SOURCE, JobBoard.of)


def board_of(text: str | bytes) -> JobBoard:
    """Reads the text of a board; raises as :func:`read_board`."""
    return JobBoard.of(parse(text, _SOURCE))


class Boards:
    """Makes one board after another, and knows who is slow."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[tuple[int, ...], int]] = {}
        self._slow: SlowRanks | None = None

    def next(self, heard: Mapping[int, Heard], now: float) -> JobBoard:
        """Returns the state of the job.

        Args:
            heard: By rank, with the rows that have come since the last board.
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
