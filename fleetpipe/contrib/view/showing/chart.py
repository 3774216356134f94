"""Computes the lines and labels of a chart, which ``templates/chart.html`` draws."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from fleetpipe.contrib.view.showing.numbers import clock, labels, ticks

#: The drawing's units, those of the template: it is stretched to its place.
_SIZE = 1000
_MARGIN = 0.06
#: Figures that differ by less of their size are one; those that are smaller than this are zero.
_FLAT = 1e-9
_TINY = 1e-200

#: From a step or a figure to a place in the drawing.
Scale = Callable[[float], float]
#: The text beside a line of the grid, and how far along its axis that is.
Label = tuple[str, float]


@dataclass(frozen=True)
class Chart:
    """Some curves on one scale.

    Attributes:
        title: The name of the figures.
        unit: The unit of the figures.
        curves: The curves to draw, with as many points as a screen shows.
        span: The first and the last step of the axis.
        paths: The class and the shape of each line.
        marks: Positions at which the run continued after a stop.
        steps_of_marks: Steps at which the run continued.
        rows: Labels of the vertical axis.
        columns: Labels of the horizontal axis.
        elapsed: For each column, how long the first curve's run had lasted; empty if unknown.
        strange: The first step whose figure is NaN or infinite; None if all are finite.
    """

    title: str
    unit: str
    curves: Sequence[Curve]
    span: tuple[int, int]
    paths: list[tuple[str, str]]
    marks: list[float]
    steps_of_marks: list[int]
    rows: list[Label]
    columns: list[Label]
    elapsed: list[str]
    strange: int | None

    @property
    def values(self) -> dict[str, object]:
        """The data of the page's script. JSON has no NaN."""
        return {
            "span": self.span,
            "marks": self.steps_of_marks,
            "curves": [
                {
                    "name": curve.name,
                    "colour": curve.colour,
                    "kind": curve.kind,
                    "xs": list(curve.xs),
                    "ys": [y if math.isfinite(y) else None for y in curve.ys],
                    "times": [round(seconds, 3) for seconds in curve.times],
                }
                for curve in self.curves
            ],
        }


def chart(title: str, curves: Sequence[Curve], unit: str = "", marks: Sequence[int] = ()) -> Chart:
    """Lays out some curves on one scale.

    Args:
        title: The name of the figures.
        curves: At least one, each with at least one point.
        unit: The unit of the figures.
        marks: Steps at which the run continued after a stop.
    """
    thin = [curve.thin() for curve in curves]
    left, right = span = _span([x for curve in thin for x in curve.xs])
    finite = [y for curve in thin for y in curve.ys if math.isfinite(y)] or [0.0]
    low, high = _range(min(finite), max(finite))

    def across(x: float) -> float:
        return round(_SIZE * (x - left) / (right - left), 2)

    def up(y: float) -> float:
        return round(_SIZE * (high - y) / (high - low), 2)

    rows = ticks(low, high)
    columns = [x for x in ticks(left, right) if x == int(x)]
    shown = [x for x in marks if left <= x <= right]
    return Chart(
        title,
        unit,
        thin,
        span,
        [path for curve in thin for path in _paths(curve, across, up)],
        [across(x) for x in shown],
        shown,
        [(text, up(y)) for text, y in zip(labels(rows), rows)],
        [(f"{x:,.0f}", across(x)) for x in columns],
        [clock(_time_at(thin[0], x)) for x in columns] if thin[0].times else [],
        min((x for curve in curves if (x := curve.strange) is not None), default=None),
    )


def _time_at(curve: Curve, step: float) -> float:
    """Returns when a step was done, interpolated between figures."""
    after = bisect_left(curve.xs, step)
    if after == 0 or after == len(curve.xs):
        return curve.times[min(after, len(curve.xs) - 1)]
    left, right = curve.xs[after - 1], curve.xs[after]
    begin, end = curve.times[after - 1], curve.times[after]
    return begin + (end - begin) * (step - left) / (right - left)


def _range(low: float, high: float) -> tuple[float, float]:
    """Returns the ends of the axis: with a margin, and at zero if that is near."""
    if high - low <= max(abs(low), abs(high), _TINY) * _FLAT:
        margin = abs(low) / 2 if abs(low) > _TINY else 1.0
        return (0.0 if low > 0 else low - margin), high + margin
    margin = (high - low) * _MARGIN
    return (0.0 if 0 <= low < (high - low) / 2 else low - margin), high + margin


def _span(xs: Sequence[int]) -> tuple[int, int]:
    low, high = min(xs), max(xs)
    if 0 < low <= high * _MARGIN:
        return 0, high
    return (low, high) if low < high else (low - 1, high + 1)


def _paths(curve: Curve, across: Scale, up: Scale) -> list[tuple[str, str]]:
    pieces, pen = [], "M"
    dots = []
    for x, y in zip(curve.xs, curve.ys):
        if not math.isfinite(y):
            pen = "M"
            continue
        point = f"{across(x):g} {up(y):g}"
        pieces.append(f"{pen}{point}")
        # A figure alone between gaps is a dot too.
        dots.append(f"M{point}h0")
        pen = "L"
    paths = [(f"{curve.kind} c{curve.colour}", "".join(pieces))]
    if curve.kind == "points" or len(dots) == 1:
        paths.append((f"dots c{curve.colour}", "".join(dots)))
    return paths


#: Points of a curve that are drawn; of more, the least and the most of each stretch.
MOST_POINTS = 600
_SMOOTH_FROM = 60
_WINDOWS = 40


@dataclass(frozen=True)
class Curve:
    """Figures by step.

    Attributes:
        name: The text in the legend.
        xs: Steps, ascending.
        ys: Figures; NaN and infinities leave gaps.
        kind: ``"line"``, ``"faint"`` if another curve shows the mean of this one, or ``"points"``
            for a line with a dot at each figure.
        colour: 0 for training, 1 for evaluation; the position among several curves of one kind.
        times: Seconds since the run began, for each figure; empty if unknown.
        unknown: Steps whose NaN stands for a gap in what is known.
    """

    name: str
    xs: Sequence[int]
    ys: Sequence[float]
    kind: str = "line"
    colour: int = 0
    times: Sequence[float] = ()
    unknown: Collection[int] = ()

    @property
    def strange(self) -> int | None:
        """The first step whose figure is NaN or infinite; None if all are finite."""
        strange = (x for x, y in zip(self.xs, self.ys) if not math.isfinite(y))
        return next((x for x in strange if x not in self.unknown), None)

    def thin(self) -> Curve:
        """Returns this curve with about as many points as a screen shows, all from the curve."""
        if len(self.xs) <= MOST_POINTS:
            return self
        length = math.ceil(2 * len(self.xs) / MOST_POINTS)
        kept = {0, len(self.xs) - 1}
        for start in range(0, len(self.xs), length):
            places = range(start, min(start + length, len(self.xs)))
            finite = [place for place in places if math.isfinite(self.ys[place])]
            kept.update([place for place in places if not math.isfinite(self.ys[place])][:1])
            if finite:
                kept.add(min(finite, key=self.ys.__getitem__))
                kept.add(max(finite, key=self.ys.__getitem__))
        places_kept = sorted(kept)
        xs = [self.xs[place] for place in places_kept]
        ys, times = (
            [values[place] for place in places_kept] if values else []
            for values in (self.ys, self.times)
        )
        return replace(self, xs=xs, ys=ys, times=times)


def with_mean(curve: Curve) -> list[Curve]:
    """Returns a long curve drawn faintly, and its moving average over it.

    A curve of few points stays as it is.
    """
    if len(curve.xs) < _SMOOTH_FROM:
        return [curve]
    window = max(5, len(curve.xs) // _WINDOWS)
    means = _means(curve.ys, window)
    return [replace(curve, kind="faint"), replace(curve, name=f"mean of {window}", ys=means)]


def _means(values: Sequence[float], window: int) -> list[float]:
    """Returns the moving average over ``window`` values, without those that are not finite."""
    means, total, count = [], 0.0, 0
    for place, value in enumerate(values):
        if math.isfinite(value):
            total, count = total + value, count + 1
        if place >= window and math.isfinite(values[place - window]):
            total, count = total - values[place - window], count - 1
        means.append(total / count if count and math.isfinite(value) else math.nan)
    return means
