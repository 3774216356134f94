"""What a rank says of itself, five times a second, as a record that is checked where it is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from fleetpipe.errors import ConfigError
from fleetpipe.json_value import JsonValue, Source

#: Most rows that a record carries: what a rank does in shorter steps is a sample.
MOST_ROWS = 16
_MOST_RANKS = 1 << 20

SOURCE = Source("this is no record of a rank", ConfigError, "give all ranks the same fleetpipe")


class StepRow(NamedTuple):
    """How long the parts of a step took on one rank, in seconds; 0 for what was not measured.

    Attributes:
        step: Its number, from 0.
        span: From the end of the step before to its own.
        cpu: Processor time of the rank's actions.
        wall: The same by the clock, without what it waited for messages, or for a processor.
        data: From the step before to the first action, without saving, or waiting for a processor.
        save: What saving took since.
        limited: In which the limit of its container let it not run.
        flights: For each rank of which messages came: its rank, the seconds that the quickest was
            on its way by the clocks of both, which may differ, and how many it waited for.
        probe: Processor time of a small piece of work that is always the same; 0: not measured.
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
    """What a rank does, and how it gets on.

    Attributes:
        rank: Its rank in the job.
        action: What it does now, in words.
        stages: The stages that it runs; none before a model is wrapped.
        replica: The number of its replica.
        shard: Its place among the ranks that share its layers.
        awaited: The rank for whose message it waits; None where it waits for none.
        step: Steps that are done, in all attempts.
        steps: Steps of the whole run; None where nobody says.
        step_age: Seconds since the last one was done; None before the first.
        step_time: Seconds of a step, the mean of the last ones.
        busy: The share of them in which it computed.
        samples: Rows of a step, of all replicas.
        memory: Bytes that the process holds.
        memory_limit: Bytes that it may hold; None where nobody says.
        held: Most forwards that it held for their backwards in the last step.
        held_cap: The ``memory_cap`` of its schedule, where that counts forwards.
        gradient_norm: Of the last step, before clipping; None where nothing is clipped by it.
        incoming: Messages that have arrived and that it has not taken.
        outgoing: Bytes that it has handed over and that are not sent.
        saved: The last step that was saved; None where none was.
        saved_age: Seconds since.
        rows: Steps that were done since the last record.
        state: On a board: ``starting``, ``running``, ``waiting``, ``stopped`` or ``ended``.
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
    busy: float = 0.0
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

    @property
    def stage(self) -> int | None:
        """The first of its stages; None before a model is wrapped."""
        return min(self.stages, default=None)

    @property
    def lean(self) -> RankRecord:
        """The record without its rows."""
        return replace(self, rows=())

    def content(self) -> dict[str, Any]:
        """Returns it as a value of JSON, with times to the nanosecond."""
        return {field.name: _rounded(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def of(cls, content: Mapping[str, object]) -> RankRecord:
        """Reads what :meth:`content` returned, written by whom it may.

        Raises:
            ConfigError: It is no such record.
        """
        return cls.read(JsonValue(content, SOURCE))

    @classmethod
    def read(cls, value: JsonValue) -> RankRecord:
        """Reads it from a value of JSON; raises as the source of that says."""
        record = value.record(cls, rows=_rows)
        if record.rank >= _MOST_RANKS or len(record.rows) > MOST_ROWS:
            raise value.refused("a record of one rank")
        return record


def _rounded(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_rounded(item) for item in value]
    return round(value, 9) if isinstance(value, float) else value


def _rows(value: JsonValue) -> tuple[StepRow, ...]:
    return tuple(item.row(StepRow, flights=JsonValue.differences) for item in value.items())


class Heard(NamedTuple):
    """What was heard of a rank: its last record, how long ago, and whether it has left."""

    record: RankRecord
    silence: float = 0.0
    left: bool = False
