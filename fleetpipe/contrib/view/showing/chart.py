"""The charts of a run: which curves stand on one scale. The page's script draws them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from statistics import median
from typing import Any, NamedTuple

from fleetpipe.contrib.view.reading.history import EVALUATED
from fleetpipe.contrib.view.reading.run_record import RunRecord, Series

LOSS, RATE, NORM, BUBBLE = "loss", "learning_rate", "gradient_norm", "bubble_rate"
THROUGHPUT = {"samples_per_second": "samples/s", "tokens_per_second": "tokens/s"}
#: Figures of the machine that are drawn, which are no metrics of the model, with their units.
_MACHINE = {**THROUGHPUT, BUBBLE: "%", "step time": "s", "busy share": "%, mean of ranks"}
_NO_METRICS = (LOSS, RATE, NORM, *_MACHINE, "peak_held")
_TITLES = {
    RATE: "learning rate",
    BUBBLE: "bubble",
    NORM: "gradient norm",
    **dict.fromkeys(THROUGHPUT, "throughput"),
}
#: Lists with a figure of each rank: title, name of a curve, unit, and factor.
_BY_RANK = {
    "busy_share_by_rank": ("busy share", "rank", "%", 100.0),
    "peak_memory_by_process": ("peak memory", "process", "GB", 1e-9),
}
#: Points of a curve that are drawn; of more, the least and the most of each stretch.
MOST_POINTS = 600
#: Of more ranks the least, the median and the most are drawn; there are as many colours.
MOST_COLOURS = 8
#: From so many points on the mean of a part of them is drawn over a curve.
_SMOOTH_FROM, _WINDOWS = 60, 40


class Curve(NamedTuple):
    """Figures by step.

    Attributes:
        name: The text in the legend.
        xs: Steps, ascending.
        ys: Figures; NaN and infinities are gaps.
        kind: ``line``, or ``points`` for a line with a dot at each figure.
        colour: 0 for training, 1 for evaluation; the position among several curves of one kind.
        times: Seconds since the run began, for each figure; empty if unknown.
        window: Over so many figures a mean is drawn too; 1 for none.
    """

    name: str
    xs: Sequence[int]
    ys: Sequence[float]
    kind: str = "line"
    colour: int = 0
    times: Sequence[float] = ()
    window: int = 1

    def thin(self) -> Curve:
        """Returns this curve with about as many points as a screen shows, all from the curve."""
        if len(self.xs) <= MOST_POINTS:
            return self
        length = math.ceil(2 * len(self.xs) / MOST_POINTS)
        indices = {0, len(self.xs) - 1}
        for start in range(0, len(self.xs), length):
            stretch = range(start, min(start + length, len(self.xs)))
            finite = [index for index in stretch if math.isfinite(self.ys[index])]
            indices.update([index for index in stretch if not math.isfinite(self.ys[index])][:1])
            if finite:
                indices.add(min(finite, key=self.ys.__getitem__))
                indices.add(max(finite, key=self.ys.__getitem__))
        shown = sorted(indices)
        return self._replace(
            xs=[self.xs[index] for index in shown],
            ys=[self.ys[index] for index in shown],
            times=[self.times[index] for index in shown] if self.times else [],
        )


class Chart(NamedTuple):
    """Some curves on one scale.

    Attributes:
        title: The name of the figures.
        unit: The unit of the figures.
        curves: At least one, each with at least one point.
        marks: Steps at which the run continued after a stop.
    """

    title: str
    unit: str
    curves: Sequence[Curve]
    marks: Sequence[int] = ()

    @property
    def values(self) -> dict[str, Any]:
        """The data of the page's script. JSON has no NaN."""
        curves = [
            {
                **curve._asdict(),
                "xs": list(curve.xs),
                "ys": [y if math.isfinite(y) else None for y in curve.ys],
                "times": [round(seconds, 3) for seconds in curve.times],
            }
            for curve in (curve.thin() for curve in self.curves)
        ]
        return {"marks": list(self.marks), "curves": curves}


def title_of(name: str) -> str:
    """Returns the page's name for a figure."""
    return _TITLES.get(name, name)


def metrics(run: RunRecord) -> list[str]:
    """Returns the names of the user's metrics, without the loss."""
    names = dict.fromkeys(name.removeprefix(EVALUATED) for name in run.series)
    return [name for name in names if name not in _NO_METRICS]


def learning(runs: Mapping[str, RunRecord]) -> list[Chart]:
    """Returns the charts of loss, metrics, learning rate and gradient norm."""
    names = dict.fromkeys(name for run in runs.values() for name in metrics(run))
    return list(_charts(runs, [LOSS, *names, RATE, NORM]))


def machine(runs: Mapping[str, RunRecord]) -> list[Chart]:
    """Returns the charts of what steps took; for a single run also those of each rank."""
    charts = list(_charts(runs, [*_MACHINE]))
    if len(runs) == 1:
        charts += chain.from_iterable(map(_charts_by_rank, runs.values()))
    return charts


def _charts(runs: Mapping[str, RunRecord], names: Sequence[str]) -> Iterator[Chart]:
    """Yields a chart for each figure that exists; each of several runs has its colour."""
    several = len(runs) > 1
    for name in names:
        curves: list[Curve] = []
        for number, (title, run) in enumerate(runs.items()):
            first, second = [number % MOST_COLOURS] * 2 if several else (0, 1)
            titles = (title, f"{title}, evaluation") if several else ("training", "evaluation")
            if name in run.series:
                curve = _curve(titles[0], run.series[name], "line", first, name == BUBBLE)
                curves.append(curve if several or name != LOSS else with_mean(curve))
            if EVALUATED + name in run.series:
                curves.append(_curve(titles[1], run.series[EVALUATED + name], "points", second))
        if curves:
            marks = [] if several else _stops(*runs.values())
            yield Chart(title_of(name), _MACHINE.get(name, ""), curves, marks)


def _curve(name: str, series: Series, kind: str, colour: int, percent: bool = False) -> Curve:
    values = [100 * value for value in series.values] if percent else series.values
    return Curve(name, series.steps, values, kind, colour, series.times)


def with_mean(curve: Curve) -> Curve:
    """Returns a curve with the window of a mean, if it has many points."""
    points = min(len(curve.xs), MOST_POINTS)
    return curve._replace(window=max(5, points // _WINDOWS) if points >= _SMOOTH_FROM else 1)


def _charts_by_rank(run: RunRecord) -> Iterator[Chart]:
    for name, (title, what, unit, factor) in _BY_RANK.items():
        rows = [row for row in run.train if name in row.lists]
        count = min((len(row.lists[name]) for row in rows), default=0)
        lists = [[factor * number for number in row.lists[name]] for row in rows]
        columns = {f"{what} {rank}": [each[rank] for each in lists] for rank in range(count)}
        if count > MOST_COLOURS:
            columns = {
                f"least of {count}": [min(each) for each in lists],
                f"median of {count}": [median(each) for each in lists],
                f"most of {count}": [max(each) for each in lists],
            }
        xs, times = [row.step for row in rows], run.elapsed(rows)
        curves = [
            Curve(each, xs, ys, "line", colour, times)
            for colour, (each, ys) in enumerate(columns.items())
        ]
        if curves:
            yield Chart(f"{title} by {what}", unit, curves, _stops(run))


def _stops(run: RunRecord) -> list[int]:
    return [attempt.step for attempt in run.board.attempts[1:]]
