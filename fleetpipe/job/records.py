"""The record that a rank sends of itself five times a second; readers check it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from fleetpipe.errors import ConfigError
from fleetpipe.json_value import JsonValue, Source

#: Most rows that a record carries: what a rank does in shorter steps is a sample.
MOST_ROWS = 16
_MOST_RANKS = 1 << 20
#: What the time from one step's end to the next one's begin is spent on.
BETWEEN = ("data", "callbacks", "evaluation", "saves", "other")
#: All that wall time is spent on: in a step a rank computes, or waits for other ranks.
PARTS = ("compute", "waiting", *BETWEEN)

SOURCE = Source("this is no record of a rank", ConfigError, "give all ranks the same fleetpipe")


class StepRow(NamedTuple):
    """The times of the parts of a step on one rank, in seconds; 0 if not measured.

    Attributes:
        step: Number of the step, from 0.
        span: Time from the end of the step before to the end of this one.
        cpu: Processor time of the rank's actions.
        wall: The same in elapsed time, without the waits for messages and for a processor.
        data: Time from the step before to the first action, without saving and waits for a
            processor.
        save: Time of saving since the step before.
        limited: Time in which the container's limit kept it from running.
        flights: For each rank that sent messages: its rank, the shortest time in seconds that one
            was on its way (by both clocks, which may differ), and how many of them this rank waited
            for.
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
    """The state and progress of one rank.

    Attributes:
        rank: Its rank in the job.
        action: Its present operation, in words.
        stages: The stages that it runs; none before a model is wrapped.
        replica: The number of its replica.
        shard: Its index among the ranks that share its layers.
        awaited: The rank for whose message it waits; None if it does not wait.
        step: Steps that are done, in all attempts.
        steps: Steps of the whole run; None if unknown.
        step_age: Seconds since the last one was done; None before the first.
        step_time: Seconds of a step, the mean of the last ones.
        usual_step: The same, their median.
        busy: The share of the last steps in which it computed.
        spent: Seconds since its first step, by ``PARTS``.
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
        saved_age: Seconds since that save.
        rows: Steps that were done since the last record.
        state: On a board: ``starting``, ``running``, ``waiting``, ``stopped`` or ``ended``.
        part: What it spends its time on between two steps; empty in steps, and if nobody says so.
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
        """Its present operation or the part of the time between steps, in words."""
        return f"{self.part}, after {self.action}" if self.part else self.action

    @property
    def lean(self) -> RankRecord:
        """The record without its rows of steps."""
        return replace(self, rows=())

    def content(self) -> dict[str, Any]:
        """Returns the record as a JSON value, with times to the nanosecond."""
        return {field.name: _round(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def of(cls, content: object) -> RankRecord:
        """Reads a value of :meth:`content`, which may come from another program.

        Raises:
            ConfigError: It is not such a record.
        """
        return cls.read(JsonValue(content, SOURCE))

    @classmethod
    def read(cls, value: JsonValue) -> RankRecord:
        """Reads a record from a JSON value; the source of the value raises errors."""
        record = value.record(cls, rows=_rows, gradient_norm=JsonValue.number)
        if (
            record.rank >= _MOST_RANKS
            or len(record.rows) > MOST_ROWS
            or len(record.spent) > len(PARTS)
        ):
            raise value.refused("a record of one rank")
        return record


def _round(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_round(item) for item in value]
    return round(value, 9) if isinstance(value, float) else value


def _rows(value: JsonValue) -> tuple[StepRow, ...]:
    return tuple(item.row(StepRow, flights=JsonValue.differences) for item in value.items())


class Heard(NamedTuple):
    """The last record of a rank, its age, and whether the rank has left."""

    record: RankRecord
    silence: float = 0.0
    left: bool = False
