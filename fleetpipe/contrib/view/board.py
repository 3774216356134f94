"""The state of a job, combined from the records of its ranks, as watchers see it.

A ``RunRecord`` is what is recorded of a run, live or in its folder; all questions are asked of it.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

from fleetpipe.contrib.view import history
from fleetpipe.contrib.view.history import AttemptRecord, History
from fleetpipe.contrib.view.slow_ranks import SlowRank, SlowRanks
from fleetpipe.errors import ConfigError
from fleetpipe.job import run_files
from fleetpipe.job.records import PARTS, LastRecord, RankRecord
from fleetpipe.json_value import JsonValue, Source, parse, read

if TYPE_CHECKING:
    from fleetpipe.contrib.view.traced_ops import Pipeline


#: The board of a job, in the folder of an attempt and in those of a run.
FILE = "watch.json"
#: After so many seconds of silence a rank is stopped, and a job whose board has not changed.
SILENT_SECONDS = 0.6
#: A job is late if its last step is older than so many usual steps, and than so many seconds.
_STEPS, _LEAST_LATE = 3, 1.0
#: Seconds from one board to the next.
PERIOD = 0.2

_SOURCE = Source("this is no board of a job", ConfigError, "watch a job of the same fleetpipe")

#: The keys of ``status``, and those of a slow rank and of a rank in it; no version changes them.
_STATUS = (
    *("state", "step", "steps", "step_time", "samples_per_second", "eta_seconds", "shares"),
    *("ranks", "slow", "restarts", "last_checkpoint"),
)
_OF_SLOW = ("rank", "what", "factor", "since")
_OF_RANK = ("rank", "stage", "state", "busy", "memory")
_NO_HISTORY = History()

#: The latest time that is believed, in seconds since 1970.
_LAST_MOMENT = 1e11


@dataclass(frozen=True, order=True)
class LastCheckpoint:
    """The last checkpoint: its step, and the seconds since it was saved."""

    step: int
    age: float


@dataclass(frozen=True)
class JobBoard:
    """The state of a job as ``fleetpipe watch`` shows it, combined from all ranks.

    Attributes:
        at: The time of this state, in seconds since 1970.
        step: Steps that are done.
        steps: Steps of the whole run; None if unknown.
        step_time: Seconds of a step.
        usual_step: The median of the seconds of the last steps.
        samples_per_second: Samples per second of all replicas together.
        ranks: The record of each rank.
        slow: The ranks that are slow.
        restarts: How often the job was restarted.
        last_checkpoint: The last checkpoint; None if none was saved.
        gradient_norm: The last step's gradient norm before clipping; None if no clip computes it.
        news: A text: why the job was restarted, or that it has ended; empty for neither.
        silence: Seconds since the last news of the job, if so long that it counts as stopped.
        history: The figures of the job's steps, and its events.
        attempts: The attempts of the run; empty if the run has no folder.
    """

    at: float
    step: int = 0
    steps: int | None = None
    step_time: float = 0.0
    usual_step: float = 0.0
    samples_per_second: float = 0.0
    ranks: tuple[RankRecord, ...] = ()
    slow: tuple[SlowRank, ...] = ()
    restarts: int = 0
    last_checkpoint: LastCheckpoint | None = None
    gradient_norm: float | None = None
    news: str = ""
    silence: float = 0.0
    history: History = field(default=_NO_HISTORY, compare=False, repr=False)
    attempts: tuple[AttemptRecord, ...] = field(default=(), compare=False, repr=False)

    @property
    def eta_seconds(self) -> float | None:
        """Seconds to the end of the run; None if unknown."""
        if self.steps is None or not self.step_time:
            return None
        left = max(0, self.steps - self.step)
        return None if left and self.state == "ended" else left * self.step_time

    @property
    def state(self) -> str:
        """``starting``, ``running``, ``late``, ``stopped`` (if any rank is) or ``ended``."""
        states = {rank.state for rank in self.ranks}
        if states == {"ended"}:
            return "ended"
        if "stopped" in states:
            return "stopped"
        if self.is_late:
            return "late"
        return "running" if states & {"running", "waiting"} else "starting"

    @property
    def is_late(self) -> bool:
        """True if steps are left, and the last ended over three usual steps and over 1 s ago."""
        if self.steps is not None and self.step >= self.steps:
            return False
        ages = [rank.step_age for rank in self.ranks if rank.step_age is not None]
        usual = self.usual_step or self.step_time
        return bool(ages) and min(ages) > max(_STEPS * usual, _LEAST_LATE)

    @property
    def shares(self) -> dict[str, float]:
        """The fraction of wall time of a mean rank by what it does; empty before two steps."""
        measured = [rank.spent for rank in self.ranks if sum(rank.spent)]
        by_rank = [[seconds / sum(spent) for seconds in spent] for spent in measured]
        return {part: fmean(shares) for part, shares in zip(PARTS, zip(*by_rank))}

    def content(self) -> dict[str, Any]:
        """Returns the state, without history and attempts, as a value for ``json.dumps``."""
        content = asdict(replace(self, history=_NO_HISTORY, attempts=()))
        del content["history"], content["attempts"]
        return content

    def status(self) -> dict[str, Any]:
        """Returns the figures of the job for scripts, under keys that no version changes."""
        status = {name: getattr(self, name) for name in _STATUS}
        status["slow"] = [{name: getattr(rank, name) for name in _OF_SLOW} for rank in self.slow]
        status["ranks"] = [
            {"last_step_age": rank.step_age, **{name: getattr(rank, name) for name in _OF_RANK}}
            for rank in self.ranks
        ]
        saved = self.last_checkpoint
        return {**status, "last_checkpoint": None if saved is None else asdict(saved)}

    @classmethod
    def from_json(cls, value: JsonValue) -> JobBoard:
        """Reads the state of a job from what :meth:`content` returned.

        Raises:
            ConfigError: The value is something else.
        """
        return value.record(
            cls,
            ranks=lambda ranks: tuple(map(RankRecord.read, ranks.items())),
            slow=lambda slow: tuple(rank.record(SlowRank) for rank in slow.items()),
            last_checkpoint=lambda saved: saved.record(LastCheckpoint),
            gradient_norm=JsonValue.number,
            history=History.from_json,
            attempts=lambda value: (),
        )

    def seen_at(self, now: float) -> JobBoard:
        """Returns the state at the time ``now``, in seconds since 1970, if nothing new is heard."""
        return self.after(max(0.0, now - self.at))

    def after(self, silence: float) -> JobBoard:
        """Returns the state ``silence`` seconds later, if nothing new is heard of the job.

        After ``SILENT_SECONDS`` the ranks count as stopped. A stopped or late job has no rate and
        no time left; in a late job the ranks for which others wait count as slow.
        """
        dead = silence >= SILENT_SECONDS
        board = self._with_silent_ranks(silence) if dead else self
        if board.state == "ended" or not (dead or board.is_late):
            return board
        slow = board.slow if dead else (*board.slow, *board._find_late_ranks())
        return replace(board, step_time=0.0, samples_per_second=0.0, slow=slow)

    def _with_silent_ranks(self, silence: float) -> JobBoard:
        """Returns the state ``silence`` seconds later, with ranks stopped that have not ended."""
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
        return replace(self, ranks=ranks, last_checkpoint=aged, silence=silence)

    def _find_late_ranks(self) -> Iterator[SlowRank]:
        """Yields the ranks that run while others wait for them, unless they evaluate."""
        if any(rank.awaited is not None for rank in self.ranks):
            for rank in self.ranks:
                if rank.state == "running" and rank.step_age and rank.part != "evaluation":
                    what = {"": "step", "saves": "save"}.get(rank.part, rank.part)
                    factor = rank.step_age / (self.usual_step or self.step_time or rank.step_age)
                    yield SlowRank(rank.rank, what, factor, "a usual step")


def read_board(path: Path) -> JobBoard:
    """Reads the state of a job from its file, and history and attempts from its folder.

    Raises:
        ConfigError: The file is missing, or is no board.
    """
    board = replace(
        read(path, _SOURCE, JobBoard.from_json), history=history.read_history(path.parent)
    )
    with suppress(OSError):
        lines = run_files.read_lines(path.parent / run_files.ATTEMPTS).values
        board = replace(board, attempts=tuple(history.attempts_of(lines)))
    return board


class BoardFile:
    """Reads the file with the state of a job, which the job replaces five times a second.

    A job whose file does not change counts as stopped. The time in the file is not compared with
    this host's clock: the clocks of two hosts may differ.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        #: The time in the last board, and when this host's clock saw it change.
        self._at: float | None = None
        self._changed = 0.0

    def __call__(self) -> JobBoard:
        """Returns the current state of the job.

        The first call waits up to 0.6 s for a change of the file, which shows that the job lives.

        Raises:
            ConfigError: The file is missing, or is no board.
        """
        board = read_board(self._path)
        if self._at is None:
            self._at = board.at
            deadline = time.monotonic() + SILENT_SECONDS
            while board.at == self._at and board.state != "ended" and time.monotonic() < deadline:
                time.sleep(PERIOD / 10)
                board = read_board(self._path)
            self._changed = time.monotonic() - max(SILENT_SECONDS, time.time() - board.at)
        if board.at != self._at:
            self._at, self._changed = board.at, time.monotonic()
        if board.state == "ended":
            return board.seen_at(time.time())
        return board.after(time.monotonic() - self._changed)


def parse_board(text: str | bytes) -> JobBoard:
    """Reads the state of a job from JSON; raises ConfigError if it is none."""
    return JobBoard.from_json(parse(text, _SOURCE))


def checkpoint_of(record: RankRecord) -> LastCheckpoint | None:
    """Returns the last checkpoint of a rank; None if it has saved none."""
    if record.saved is None or record.saved_age is None:
        return None
    return LastCheckpoint(record.saved, record.saved_age)


class Boards:
    """Combines the records of ranks into the state of their job, and finds slow ranks."""

    def __init__(self) -> None:
        self._stages: dict[int, tuple[tuple[int, ...], int]] = {}
        self._slow = SlowRanks({})

    def next_board(self, heard: Mapping[int, LastRecord], now: float) -> JobBoard:
        """Returns the state of the job, made from the records of its ranks.

        Args:
            heard: The last record of each rank, with the rows that came since the last board.
            now: Seconds since 1970.
        """
        records = {rank: last.record for rank, last in heard.items()}
        first = records[min(records)]
        saved = max(filter(None, map(checkpoint_of, records.values())), default=None)
        step_time, usual = (
            median([getattr(rank, name) for rank in records.values() if rank.step_time] or [0.0])
            for name in ("step_time", "usual_step")
        )
        return JobBoard(
            at=now,
            step=min(record.step for record in records.values()),
            steps=first.steps,
            step_time=step_time,
            usual_step=usual,
            samples_per_second=first.samples / step_time if step_time else 0.0,
            ranks=tuple(_record_with_state(heard[rank]) for rank in sorted(heard)),
            slow=tuple(self._find_slow_ranks(records)),
            last_checkpoint=saved,
            gradient_norm=first.gradient_norm,
        )

    def _find_slow_ranks(self, records: Mapping[int, RankRecord]) -> list[SlowRank]:
        """Adds the steps since the last call to the comparison; returns the slow ranks."""
        if len(records) == 1:
            return []  # there is no other rank to compare it with
        stages = {rank: (record.stages, record.shard) for rank, record in records.items()}
        if stages != self._stages:
            self._stages, self._slow = stages, SlowRanks(stages)
        return self._slow.add({rank: record.rows for rank, record in records.items()})


def _record_with_state(heard: LastRecord) -> RankRecord:
    """Returns the record of a rank, with its current state and the current age of its last step."""
    record, age = heard.record, heard.record.step_age
    if age is None:
        state = "starting"
    else:
        state, age = "running" if record.awaited is None else "waiting", age + heard.silence
    if heard.left or heard.silence > SILENT_SECONDS:
        state = "ended" if heard.left else "stopped"
    return replace(record, rows=(), state=state, step_age=age)


class Series(NamedTuple):
    """One figure at several steps.

    Attributes:
        steps: The steps, ascending.
        values: The figure at each step, NaN and infinities included.
        times: Seconds from the start of the run to each step; empty if unknown.
    """

    steps: Sequence[int]
    values: Sequence[float]
    times: Sequence[float]


class Row(NamedTuple):
    """The figures of one batch or one evaluation.

    Attributes:
        step: How many batches were trained by then, in all epochs, this one included.
        epoch: Number of the epoch, from 0.
        time: Seconds since 1970; 0 if the line has none.
        figures: Values by name, NaN and infinities included.
        lists: Lists with a value for each rank, by name.
    """

    step: int
    epoch: int
    time: float
    figures: dict[str, float]
    lists: dict[str, list[float]]


@dataclass(frozen=True)
class RunRecord:
    """All that is known of a run: from its folder, or for a running job from its board.

    Attributes:
        name: The name of the folder, or of the job.
        board: The last board of the job; if none was written, one made from its rows.
        train: Rows of batches, by step; of a step that ran twice, the later row.
        evaluations: Rows of evaluations, by step.
        about: ``run.json``; empty without that file.
        pipeline: The predicted and the measured timelines; None if unknown.
        notes: Texts about missing or damaged files, why, and what to do.
        saved: The step of the newest checkpoint in the folder, and the hash of its model.
    """

    name: str
    board: JobBoard
    train: Sequence[Row] = ()
    evaluations: Sequence[Row] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    pipeline: Pipeline | None = None
    notes: Sequence[str] = ()
    saved: tuple[int, str] | None = None

    @cached_property
    def series(self) -> dict[str, Series]:
        """The figures by name, of evaluations as ``eval_loss``; from the rows where they exist."""
        ends, at_ends = [row.step for row in self.train], self.elapsed(self.train)
        series: dict[str, Series] = {}
        for name, (steps, values) in self.board.history.series().items():
            rows_at = (max(0, bisect_right(ends, step) - 1) for step in steps)
            series[name] = Series(steps, values, [at_ends[row] for row in rows_at if at_ends])
        for prefix, rows in (("", self.train), (history.EVALUATED, self.evaluations)):
            for name in dict.fromkeys(name for row in rows for name in row.figures):
                with_figure = [row for row in rows if name in row.figures]
                series[prefix + name] = Series(
                    [row.step for row in with_figure],
                    [row.figures[name] for row in with_figure],
                    self.elapsed(with_figure),
                )
        return series

    @property
    def points(self) -> dict[str, list[tuple[int, float]]]:
        """The steps and values of each figure, without the NaN that stand for missing steps."""
        gaps = set(self.board.history.gaps().values())
        return {
            name: [(step, value) for step, value in zip(steps, values) if step not in gaps]
            for name, (steps, values, _) in self.series.items()
        }

    def elapsed(self, rows: Sequence[Row]) -> list[float]:
        """Returns the seconds from the start of the run to each of the rows; empty if unknown."""
        starts = [attempt.began for attempt in self.board.attempts[:1]]
        starts += [row.time for row in self.train[:1]]
        begin = min(filter(_is_plausible_time, starts), default=0.0)
        if not begin or not all(_is_plausible_time(row.time) for row in rows):
            return []
        return [max(0.0, row.time - begin) for row in rows]

    def section(self, name: str) -> Mapping[str, Any]:
        """Returns a section of ``run.json`` by name; empty if there is none."""
        value = self.about.get(name)
        return value if isinstance(value, dict) else {}


def _is_plausible_time(value: float) -> bool:
    """Returns whether a time in seconds since 1970 can be that of a run."""
    return 0 < value < _LAST_MOMENT
