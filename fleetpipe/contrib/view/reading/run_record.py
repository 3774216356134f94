"""What is recorded of a run, live or in its folder: of this all questions are asked."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from fleetpipe.contrib.view.reading.board import JobBoard
from fleetpipe.contrib.view.reading.history import EVALUATED

if TYPE_CHECKING:  # a job that runs has no timelines
    from fleetpipe.contrib.view.reading.timelines import Pipeline

#: Of any clock, in seconds since 1970.
_LAST_MOMENT = 1e11


class Series(NamedTuple):
    """A figure by step.

    Attributes:
        steps: The steps, ascending.
        values: The figure, NaN and infinities included.
        times: Seconds since the run began; empty if unknown.
    """

    steps: Sequence[int]
    values: Sequence[float]
    times: Sequence[float]


class Row(NamedTuple):
    """The figures of one batch or one evaluation.

    Attributes:
        step: Batches trained by then, in all epochs.
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
    """What is recorded of a run: in its folder, or by a job that runs, which has its board alone.

    Attributes:
        name: The name of the folder, or of the job.
        board: The last state of the job; if nobody wrote it, what its rows tell.
        train: Rows of batches, by step; the later one of a step that was run twice.
        evaluations: Rows of evaluations, by step.
        about: ``run.json``; empty without that file.
        pipeline: The predicted and the measured timelines; None if unknown.
        notes: Texts about missing or damaged files, why, and what to do.
        saved: The newest step of checkpoints in the folder, and the hash of its model.
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
        """The figures by name, of evaluations as ``eval_loss``; rows know more than the board."""
        series = {
            name: Series(steps, values, self._elapsed_at(steps))
            for name, (steps, values) in self.board.history.series().items()
        }
        for prefix, rows in (("", self.train), (EVALUATED, self.evaluations)):
            for name in dict.fromkeys(name for row in rows for name in row.figures):
                chosen = [row for row in rows if name in row.figures]
                series[prefix + name] = Series(
                    [row.step for row in chosen],
                    [row.figures[name] for row in chosen],
                    self.elapsed(chosen),
                )
        return series

    @property
    def points(self) -> dict[str, list[tuple[int, float]]]:
        """The steps and figures by name, without the gaps of what is unknown."""
        gaps = set(self.board.history.unknown().values())
        return {
            name: [(x, y) for x, y in zip(one.steps, one.values) if x not in gaps]
            for name, one in self.series.items()
        }

    def _elapsed_at(self, steps: Sequence[int]) -> list[float]:
        """Returns how long the run had lasted at each step, as the rows tell; empty if unknown."""
        ends = [row.step for row in self.train]
        times = self.elapsed(self.train)
        return [times[max(0, bisect_right(ends, step) - 1)] for step in steps] if times else []

    def elapsed(self, rows: Sequence[Row]) -> list[float]:
        """Returns how long the run had lasted at each row; an empty list if unknown."""
        begun = [each.began for each in self.board.attempts[:1]]
        moments = [*begun, *(row.time for row in self.train[:1])]
        begin = min(filter(_is_moment, moments), default=0.0)
        if not begin or not all(_is_moment(row.time) for row in rows):
            return []
        return [max(0.0, row.time - begin) for row in rows]

    def section(self, name: str) -> Mapping[str, Any]:
        """Returns a part of ``run.json``; empty if there is none of that name."""
        value = self.about.get(name)
        return value if isinstance(value, dict) else {}


def _is_moment(value: float) -> bool:
    return 0 < value < _LAST_MOMENT
