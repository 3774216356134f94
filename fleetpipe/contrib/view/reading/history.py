"""The figures of a run by step, from the first step to the last, in bounded memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from fleetpipe.errors import ConfigError
from fleetpipe.json_value import JsonValue, Source, read

#: The history of a job, beside its board.
FILE = "watch-history.json"
#: Rows that are kept; of more, each two become one.
MOST = 600
#: Names of a row's figures begin so if an evaluation has measured them.
EVALUATED = "eval_"

_SOURCE = Source("this is no history of a job", ConfigError, "remove it: the job writes another")


class HistoryRow(NamedTuple):
    """The figures of a step, or of as many steps as a row stands for, by name."""

    step: int
    figures: Mapping[str, float]


class History:
    """Figures by step: a row for each step, or for more of them where there would be too many rows.

    A row has the last figure of its steps; a NaN or an infinity among them stays.

    Attributes:
        stride: How many steps a row stands for.
        last: The last step; 0 without one.
    """

    def __init__(self, rows: Iterable[HistoryRow] = (), stride: int = 1) -> None:
        self.stride, self.last = stride, 0
        # A row is never changed, so that other threads may read it.
        self._rows: dict[int, Mapping[str, float]] = {}
        for row in rows:
            self.add(*row)

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Adds figures of a step, from 1.

        What was known of later steps is dropped: the run goes on from a checkpoint.
        """
        place = (max(1, step) - 1) // self.stride
        if step < self.last:
            kept = {at: row for at, row in self._rows.items() if at < place}
            self._rows, self.stride = kept, self.stride if kept else 1
            place = (max(1, step) - 1) // self.stride
        self.last = step
        self._rows[place] = _join(self._rows.get(place, {}), figures)
        if len(self._rows) > MOST:
            halved: dict[int, Mapping[str, float]] = {}
            for at, row in self._rows.items():
                halved[at // 2] = _join(halved.get(at // 2, {}), row)
            self._rows, self.stride = halved, 2 * self.stride

    def rows(self) -> list[HistoryRow]:
        """Returns the rows, each with its last step."""
        ends = ((self.stride * (at + 1), row) for at, row in list(self._rows.items()))
        return [HistoryRow(min(self.last, step), row) for step, row in ends]

    def series(self) -> dict[str, tuple[list[int], list[float]]]:
        """Returns steps and values of each figure; NaN stands at the steps of :meth:`unknown`."""
        series: dict[str, tuple[list[int], list[float]]] = {}
        gaps = self.unknown()
        for step, figures in self.rows():
            for name, value in figures.items():
                steps, values = series.setdefault(name, ([], []))
                if step in gaps and steps:
                    steps.append(gaps[step])
                    values.append(math.nan)
                steps.append(step)
                values.append(value)
        return series

    def unknown(self) -> dict[int, int]:
        """Returns a step of which nothing is known, by the next one that has figures."""
        steps = [0, *(row.step for row in self.rows())]
        pairs = itertools.pairwise(steps)
        return {step: x + self.stride for x, step in pairs if step - x > 2 * self.stride}

    def content(self) -> dict[str, Any]:
        """Returns the history as a value of Python's JSON, which has NaN and infinities."""
        return {"stride": self.stride, "rows": [[step, {**row}] for step, row in self.rows()]}

    @classmethod
    def of(cls, value: JsonValue) -> History:
        """Reads a history from a value that :meth:`content` returned.

        Raises:
            ConfigError: The value is no history.
        """
        rows = value["rows"].items()
        if len(rows) > MOST or not value["stride"].count():
            raise value.refused(f"at most {MOST} rows")
        return cls((row.row(HistoryRow, figures=_figures) for row in rows), value["stride"].count())


def _figures(value: JsonValue) -> dict[str, float]:
    return {name: figure.number() for name, figure in value.fields().items()}


def _join(earlier: Mapping[str, float], later: Mapping[str, float]) -> Mapping[str, float]:
    strange = {name: value for name, value in earlier.items() if not math.isfinite(value)}
    return {**earlier, **later, **strange}


def read_history(folder: Path) -> History:
    """Reads the history in a folder; an empty one if there is none, or a damaged one."""
    with suppress(ConfigError):
        return read(folder / FILE, _SOURCE, History.of)
    return History()
