"""The state of a job, put together from what its ranks tell: what whoever watches it is shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from fleetpipe.errors import ConfigError
from fleetpipe.json_value import JsonValue, Source, parse, read
from fleetpipe.watch.records import RankRecord
from fleetpipe.watch.slow_ranks import SlowRank, SlowRanks

#: The board of a job, in the folder of an attempt and in those of a run.
FILE = "watch.json"
#: A rank that was not heard for so long is called stopped.
SILENT_SECONDS = 0.6
#: Seconds from one board to the next.
PERIOD = 0.2

_SOURCE = Source("this is no board of a job", ConfigError, "watch a job of the same fleetpipe")


class LastCheckpoint(NamedTuple):
    """The last checkpoint: its step, and the seconds since it was saved."""

    step: int
    age: float


class RankState(NamedTuple):
    """How a rank gets on.

    Attributes:
        rank: Its rank in the job.
        stage: The first of its stages; None before a model is wrapped.
        state: ``starting``, ``running``, ``waiting``, ``stopped`` or ``ended``.
        busy: The share of the last steps in which it computed.
        memory: Bytes that its process holds.
        last_step_age: Seconds since it finished a step; None before the first.
        step: Steps that are done.
        action: What it does, in words.
        incoming: Messages that it has not taken.
        outgoing: Bytes that it has not sent.
    """

    rank: int
    stage: int | None = None
    state: str = "starting"
    busy: float = 0.0
    memory: int = 0
    last_step_age: float | None = None
    step: int = 0
    action: str = "nothing heard yet"
    incoming: int = 0
    outgoing: int = 0


#: What a script gets of each rank.
_OF_RANK = RankState._fields[:6]


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
        news: What became of the job, where that is to be said.
    """

    at: float
    step: int = 0
    steps: int | None = None
    step_time: float = 0.0
    samples_per_second: float = 0.0
    ranks: tuple[RankState, ...] = ()
    slow: tuple[SlowRank, ...] = ()
    restarts: int = 0
    last_checkpoint: LastCheckpoint | None = None
    news: str = ""

    @property
    def eta_seconds(self) -> float | None:
        """Seconds to the end of the run; None where nobody knows."""
        if self.steps is None or not self.step_time:
            return None
        return max(0, self.steps - self.step) * self.step_time

    def content(self) -> dict[str, Any]:
        """Returns all of it as a value of JSON."""
        ranks = [rank._asdict() for rank in self.ranks]
        slow = [one._asdict() for one in self.slow]
        saved = self.last_checkpoint and self.last_checkpoint._asdict()
        return {**asdict(self), "ranks": ranks, "slow": slow, "last_checkpoint": saved}

    def status(self) -> dict[str, Any]:
        """Returns what scripts get, under keys that stay as they are."""
        content = self.content()
        return {
            "step": self.step,
            "steps": self.steps,
            "step_time": self.step_time,
            "samples_per_second": self.samples_per_second,
            "eta_seconds": self.eta_seconds,
            "ranks": [{name: rank[name] for name in _OF_RANK} for rank in content["ranks"]],
            **{name: content[name] for name in ("slow", "restarts", "last_checkpoint")},
        }

    @classmethod
    def of(cls, value: JsonValue) -> JobBoard:
        """Reads what :meth:`content` returned.

        Raises:
            ConfigError: It is something else.
        """
        return value.record(cls, JsonValue.figure, **_READERS)

    def seen_at(self, now: float) -> JobBoard:
        """Returns it as it is a while later, where nothing has been heard since."""
        silence = now - self.at
        if silence < SILENT_SECONDS:
            return self
        ranks = (
            rank._replace(
                state=rank.state if rank.state == "ended" else "stopped",
                last_step_age=None if rank.last_step_age is None else rank.last_step_age + silence,
            )
            for rank in self.ranks
        )
        saved = self.last_checkpoint
        aged = saved and saved._replace(age=saved.age + silence)
        return replace(self, ranks=tuple(ranks), last_checkpoint=aged)


def _rank(value: JsonValue) -> RankState:
    return value.record(
        RankState,
        JsonValue.count,
        state=JsonValue.text,
        busy=JsonValue.figure,
        last_step_age=JsonValue.figure,
        action=JsonValue.text,
    )


def _slow(value: JsonValue) -> SlowRank:
    return value.record(SlowRank, JsonValue.count, what=JsonValue.text, factor=JsonValue.figure)


def _last_checkpoint(value: JsonValue) -> LastCheckpoint:
    return value.record(LastCheckpoint, JsonValue.count, age=JsonValue.figure)


_READERS = {
    "step": JsonValue.count,
    "steps": JsonValue.count,
    "restarts": JsonValue.count,
    "ranks": lambda value: tuple(map(_rank, value.items())),
    "slow": lambda value: tuple(map(_slow, value.items())),
    "last_checkpoint": _last_checkpoint,
    "news": JsonValue.text,
}


def read_board(path: Path) -> JobBoard:
    """Reads the file of a board.

    Raises:
        ConfigError: There is none.
    """
    return read(path, _SOURCE, JobBoard.of)


def board_of(text: str | bytes) -> JobBoard:
    """Reads the text of a board; raises as :func:`read_board`."""
    return JobBoard.of(parse(text, _SOURCE))


class Heard(NamedTuple):
    """What was heard of a rank: its last record, how long ago, and whether it has left."""

    record: RankRecord
    silence: float = 0.0
    left: bool = False


class Boards:
    """Makes one board after another, and knows who is slow."""

    def __init__(self) -> None:
        """Knows no rank yet."""
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
        )

    def _name_slow(self, records: Mapping[int, RankRecord]) -> list[SlowRank]:
        places = {rank: (one.stages, one.shard) for rank, one in records.items()}
        if self._slow is None or places != self._places:
            self._places, self._slow = places, SlowRanks(places)
        return self._slow.add({rank: one.rows for rank, one in records.items()})


def _state(heard: Heard) -> RankState:
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
    return RankState(
        record.rank,
        min(record.stages, default=None),
        state,
        record.busy,
        record.memory,
        age,
        record.step,
        record.action,
        record.incoming,
        record.outgoing,
    )
