"""Reads which operation ran when on which rank, from fleetpipe's traces and from tables.

``pipeline_of`` reads the predicted and the measured timeline of a pipeline, from a schedule's text
and a trace.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from fleetpipe.errors import ConfigError, PackageNotFound
from fleetpipe.extras import INSTALLED_BY
from fleetpipe.schedules import Action, Fused, Placement, Recv, Schedule, Send, SliceNumber
from fleetpipe.schedules.action import parts
from fleetpipe.schedules.forms import trace as trace_form
from fleetpipe.schedules.forms.trace import Event, caveat, device_of, events_of

#: The columns of a table; a missing ``replica``, ``chunk`` or ``micro_batch`` counts as 0.
COLUMNS = ("step", "replica", "stage", "chunk", "kind", "micro_batch", "start", "duration")
_OPTIONAL = ("replica", "chunk", "micro_batch")

#: Communications between two neighbouring stages, and between all replicas of a stage.
TRANSFERS = frozenset({"forward-send", "forward-recv", "backward-send", "backward-recv"})
COLLECTIVES = frozenset({"grads-reduce-scatter", "grads-all-reduce", "params-all-gather"})
COMMUNICATIONS = TRANSFERS | COLLECTIVES

#: Kinds by the spellings of published traces.
KINDS: Mapping[str, str] = {
    "forward-compute": "F",
    "forward": "F",
    "f": "F",
    "backward-compute": "B",
    "backward": "B",
    "b": "B",
    "i": "I",
    "w": "W",
    **{kind: kind for kind in (*sorted(COMMUNICATIONS), "optimizer")},
}

_Row = Mapping[str, Any]

#: The largest number that a column of a table may have.
_MOST = 1e18

#: The most seconds that the engine takes between two operations of a rank.
_ENGINE_SECONDS = 1e-3

#: The most ranks of a pipeline with fewer stages than ranks: each is a row to draw.
_MOST_IDLE = 1000
#: The timelines of a trace: of the simulated schedule, and of the run.
_TRACKS = ("predicted", "measured")


class TracedOperation(NamedTuple):
    """One operation of a rank.

    Attributes:
        step: The step that it belongs to.
        replica: The replica of the rank, from 0.
        stage: The rank's number in its pipeline.
        part: The number of the model part, counted along the model: chunk * ranks + rank.
        kind: F, B, I, W, one of ``COMMUNICATIONS``, "optimizer", or any other computation.
        micro_batch: The micro-batch, or a slice of one.
        start: When it began, in seconds.
        duration: Seconds until its end, waits included.
        early: How many actions began later on the rank, though they are earlier in the schedule.
        queued: Seconds of the duration in which the rank waited for a processor.
    """

    step: int
    replica: int
    stage: int
    part: int
    kind: str
    micro_batch: int
    start: float
    duration: float
    early: int = 0
    queued: float = 0.0

    @property
    def end(self) -> float:
        """When the operation ended, in seconds."""
        return self.start + self.duration

    @property
    def rank(self) -> tuple[int, int]:
        """The replica and the stage that ran the operation."""
        return self.replica, self.stage


def read_columns(path: str | Path) -> list[TracedOperation]:
    """Reads a table with a row for each operation, from CSV or (``.parquet``) Parquet.

    Other columns are ignored; an unknown kind is a computation.

    Raises:
        ConfigError: A column is missing, or a value is not a number.
        PackageNotFound: Parquet needs pyarrow.
        OSError: The file cannot be read.
    """
    rows = (_read_parquet if Path(path).suffix == ".parquet" else _read_csv)(path)
    operations = [
        _operation_in_row(row, f"{path}, row {number}") for number, row in enumerate(rows, 1)
    ]
    if not operations:
        raise ConfigError("the table has no rows", where=str(path), fix="give one of a whole step")
    ranks = 1 + max(operation.stage for operation in operations)
    return [op._replace(part=op.part * ranks + op.stage) for op in operations]


def read_trace(path: str | Path) -> list[TracedOperation]:
    """Reads the measured operations from the ``trace.json`` of a traced run.

    Raises:
        ConfigError: It is not a trace of fleetpipe.
        OSError: The file cannot be read.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        operations = [
            operation
            for track, events in trace_form.tracks_of(document).items()
            if track != "predicted"
            for event in events
            for operation in _operations_in_event(event)
        ]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ConfigError(
            "this is no trace of fleetpipe's",
            where=str(path),
            cause=f"{type(error).__name__}: {error}",
            fix="give the trace.json that fleetpipe_configs['trace'] writes, or --columns "
            "for a table",
        ) from error
    if not operations:
        raise ConfigError("the trace has no actions", where=str(path), fix="trace a whole step")
    stepped = _number_steps(_number_slices(operations))
    numbers = trace_form.steps_of(document, 1 + max(op.step for op in stepped), first=0)
    return [op._replace(step=numbers[op.step]) for op in stepped]


def _operations_in_event(event: Event) -> Iterator[TracedOperation]:
    """Yields the operation of an event, in step 0; nothing if it is no action or transfer."""
    rank, times, op = event.rank, (event.start, event.end - event.start), event.op
    if isinstance(op, (Send, Recv)):
        name = str(op)
        # The name begins with S or R for a send or receive, and F or B for its direction.
        way = "forward" if name[1] == "F" else "backward"
        kind = f"{way}-{'send' if name[0] == 'S' else 'recv'}"
        # The rank's own stage: the value leaves it, or arrives there.
        is_target = (name[0] == "R") == (name[1] == "F")
        stage = op.edge.target if is_target else op.edge.source
        yield TracedOperation(0, 0, rank, stage, kind, op.micro_batch, *times, queued=event.queued)
    elif isinstance(op, (Action, Fused)):
        first = parts(op)[0]
        kind = "|".join(part.kind for part in parts(op))
        place = first.stage, kind, first.micro_batch
        yield TracedOperation(0, 0, rank, *place, *times, event.early, event.queued)


def _number_slices(operations: list[TracedOperation]) -> list[TracedOperation]:
    """Sets, in operations on sequence chunks ("slices"), how many chunks a micro-batch has.

    A ``SliceNumber`` has the number of an operation's chunk, and how many there are: the highest
    number in the trace, plus 1.
    """
    # By the index of an operation on a chunk, the micro-batch and the chunk.
    sliced = {
        index: divmod(int(op.micro_batch), op.micro_batch.slices)
        for index, op in enumerate(operations)
        if isinstance(op.micro_batch, SliceNumber)
    }
    slices = 1 + max((number for _, number in sliced.values()), default=0)
    numbered = [*operations]
    for index, (micro_batch, number) in sliced.items():
        of_slice = SliceNumber(micro_batch, number, slices)
        numbered[index] = numbered[index]._replace(micro_batch=of_slice)
    return numbered


def _number_steps(operations: list[TracedOperation]) -> list[TracedOperation]:
    """Returns the operations, sorted by start, with their steps numbered from 0.

    The step of an operation is the number of times its rank has run the same operation before. If
    the trace has transfers, an operation begins earlier by a short gap before it (less than
    ``_ENGINE_SECONDS``), in which the engine ran.
    """
    numbers: dict[tuple[object, ...], int] = {}
    # By step and rank, the end of the operation before.
    ends: dict[tuple[int, tuple[int, int]], float] = {}
    longest_gap = _ENGINE_SECONDS if any(op.kind in TRANSFERS for op in operations) else 0.0
    numbered = []
    for op in sorted(operations, key=lambda operation: operation.start):
        key = op.rank, op.part, op.kind, op.micro_batch
        numbers[key] = numbers.get(key, -1) + 1
        step_of_rank = numbers[key], op.rank
        gap = op.start - ends.get(step_of_rank, op.start)
        start = op.start - gap if 0 < gap < longest_gap else op.start
        numbered.append(op._replace(step=numbers[key], start=start, duration=op.end - start))
        ends[step_of_rank] = op.end
    return numbered


def _read_csv(path: str | Path) -> Iterator[_Row]:
    """Yields the rows of a table; first raises a ConfigError if a column is missing."""
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            _require_columns(path, reader.fieldnames or ())
            yield from reader
    except csv.Error as error:
        raise _unreadable_table(path, error) from error


def _read_parquet(path: str | Path) -> Sequence[_Row]:
    """Returns the rows of a table; raises a ConfigError if a column is missing."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise PackageNotFound(
            "a table in Parquet needs pyarrow", fix=f"{INSTALLED_BY['ray']}, or give a CSV file"
        ) from error
    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise _unreadable_table(path, error) from error
    _require_columns(path, table.column_names)
    rows: list[_Row] = table.select([c for c in COLUMNS if c in table.column_names]).to_pylist()
    return rows


def _require_columns(path: str | Path, names: Sequence[str]) -> None:
    """Raises a ConfigError if a table lacks a required column."""
    missing = [name for name in COLUMNS if name not in _OPTIONAL and name not in names]
    if missing:
        raise ConfigError(
            f"the table has no column {missing[0]!r}",
            where=str(path),
            expected=", ".join(COLUMNS),
            got=", ".join(names),
            fix="name its columns so, in the first line",
        )


def _unreadable_table(path: str | Path, error: Exception) -> ConfigError:
    """Returns the error for a file that is no table."""
    cause = str(error)[:200]
    return ConfigError("this is no table", where=str(path), cause=cause, fix="write it again")


def _operation_in_row(row: _Row, where: str) -> TracedOperation:
    """Returns the operation in a row of a table, with the number of the rank's chunk as ``part``.

    The caller computes the number of the model part when it knows the number of ranks.

    Args:
        row: The row.
        where: The file and the number of the row, for errors.
    """
    kind = str(row.get("kind") or "").strip()
    if not kind:
        raise ConfigError("an operation has no kind", where=where, fix=f"give {', '.join(KINDS)}")
    step, replica, stage, chunk, micro_batch = (
        int(_number_in(row, name, where, least=0, whole=True))
        for name in ("step", "replica", "stage", "chunk", "micro_batch")
    )
    start = _number_in(row, "start", where, -_MOST)
    duration = _number_in(row, "duration", where, least=0)
    name = KINDS.get(kind.lower().replace("_", "-"), kind)
    return TracedOperation(step, replica, stage, chunk, name, micro_batch, start, duration)


def _number_in(row: _Row, name: str, where: str, least: float, whole: bool = False) -> float:
    """Returns the number in a column of a row; 0 if an optional column is empty.

    Args:
        row: The row.
        name: The name of the column.
        where: The file and the number of the row, for errors.
        least: The least number that is valid.
        whole: Whether the number has to be a whole one.
    """
    value = row.get(name)
    if value in (None, "") and name in _OPTIONAL:
        return 0
    with suppress(ValueError):
        number = float(str(value))
        if least <= number <= _MOST and not (whole and number % 1):
            return number
    raise ConfigError(
        f"column {name!r} has no {'whole ' * whole}number",
        where=where,
        expected=f"from {least:g} to {_MOST:g}",
        got=repr(value),
        fix="write the table again",
    )


@dataclass(frozen=True)
class Pipeline:
    """The timelines of a pipeline.

    Attributes:
        placement: Which rank owns which stage.
        predicted: The simulated schedule, with the median costs of the trace; without a trace, with
            a cost of 1 for each of F, I and W.
        traced: The events of each traced step; empty without a trace.
        numbers: The numbers of the traced steps in the run.
        unit: The unit of the times: ``"s"``, or empty if they are costs of 1.
        peaks: The most forwards that each rank holds under the schedule; empty if unknown.
        caveat: A warning about the traced steps, or empty.
    """

    placement: Placement
    predicted: list[Event]
    traced: list[list[Event]]
    numbers: Sequence[int] = ()
    unit: str = ""
    peaks: tuple[float, ...] = ()
    caveat: str = ""

    @property
    def measured(self) -> list[Event]:
        """The events of the traced step with the median bubble; empty without a trace."""
        return self.traced[trace_form.median_step(self.traced)] if self.traced else []


def pipeline_of(schedule: Any, trace: Path | None) -> Pipeline | None:
    """Returns the timelines of a run; None without a schedule and a trace.

    Args:
        schedule: The schedule in ``run.json``, with its text form under ``"text"``.
        trace: A ``trace.json`` with both tracks, as a run writes it.

    Raises:
        OSError, ValueError, KeyError, TypeError: The trace is no file of a traced run.
        FleetPipeError: The text is not a schedule.
    """
    text = schedule.get("text") if isinstance(schedule, dict) else None
    simulated = Schedule.parse(text).simulate() if isinstance(text, str) else None
    peaks = simulated.peak_activations if simulated else ()
    if trace is not None:
        document = json.loads(trace.read_text(encoding="utf-8"))
        tracks, stages = _read_tracks(document, trace.name)
        steps = [_start_at_zero(step) for step in _split_steps(tracks["measured"])]
        numbers = trace_form.steps_of(document, len(steps))
        predicted, warning = _start_at_zero(tracks["predicted"]), caveat(device_of(document))
        return Pipeline(placement_of(stages), predicted, steps, numbers, "s", peaks, warning)
    if simulated is None:
        return None
    return Pipeline(simulated.schedule.placement, events_of(simulated), [], peaks=peaks)


def _read_tracks(document: Any, name: str) -> tuple[dict[str, list[Event]], dict[int, int]]:
    """Returns the events of actions in each of ``_TRACKS``, and the rank of each stage.

    Args:
        document: The content of a ``trace.json``.
        name: The name of the file, for errors.

    Raises:
        ValueError: The trace has other tracks, or a stage on two ranks.
    """
    events = trace_form.tracks_of(document)
    if not events.keys() <= {*_TRACKS}:
        raise ValueError(f"{name} has the tracks {', '.join(events)}")
    tracks = {track: [op for op in events.get(track, ()) if op.actions] for track in _TRACKS}
    stages: dict[int, int] = {}
    for event in chain.from_iterable(tracks.values()):
        for action in event.actions:
            if stages.setdefault(action.stage, event.rank) != event.rank:
                raise ValueError(f"stage {action.stage} is on two ranks in {name}")
    return tracks, stages


def placement_of(stages: dict[int, int]) -> Placement:
    """Returns the placement in which each stage is on the given rank.

    Args:
        stages: The rank of each stage.

    Raises:
        ValueError: There is no such placement.
    """
    ranks = max(stages.values(), default=0) + 1
    if ranks > max(_MOST_IDLE, len(stages)):
        raise ValueError(f"no pipeline of {ranks} ranks has just {len(stages)} stages")
    chunks = -(-max(1, len(stages)) // ranks)
    names = ("loop", *(["vee"] if chunks == 2 else []), *(["wave"] if chunks % 2 == 0 else []))
    for placement in (Placement(name, ranks, chunks) for name in names):
        if all(
            stage < placement.stages and placement.rank_of(stage) == rank
            for stage, rank in stages.items()
        ):
            return placement
    raise ValueError(f"no placement has stages {stages} (stage: rank)")


def _split_steps(events: Sequence[Event]) -> list[list[Event]]:
    """Splits a trace into steps, in each of which every action runs once."""
    # By rank and name of an action, its events in the order of the steps.
    runs: defaultdict[tuple[int, str], list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.start):
        runs[event.rank, event.name].append(event)
    return [list(step) for step in zip(*runs.values())]


def _start_at_zero(events: Sequence[Event]) -> list[Event]:
    """Returns the events moved so that the first one begins at 0."""
    begin = min((event.start for event in events), default=0.0)
    return [event._replace(start=event.start - begin, end=event.end - begin) for event in events]
