"""Computes the drawings of a page: the charts of a run, and the timelines of its ranks.

It formats numbers, chooses which curves share a chart, and where an axis has ticks. The page's
script draws the charts (``learning``, ``machine``), ``templates/timelines.html`` the timelines
(``drawings``).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Any, NamedTuple

from fleetpipe.contrib.pictures import Bar, Panel
from fleetpipe.contrib.view.board import RunRecord, Series
from fleetpipe.contrib.view.history import EVALUATED
from fleetpipe.contrib.view.traced_ops import Pipeline
from fleetpipe.schedules.forms.trace import Event, figures_of

_STEPS = (1, 2, 2.5, 5, 10)
_BYTE_UNITS = ("B", "KB", "MB", "GB", "TB")

LOSS, RATE, NORM, BUBBLE = "loss", "learning_rate", "gradient_norm", "bubble_rate"
THROUGHPUT = {"samples_per_second": "samples/s", "tokens_per_second": "tokens/s"}
#: The drawn figures that are no metrics of the model, with their units.
_MACHINE = {**THROUGHPUT, BUBBLE: "%", "step time": "s", "busy share": "%, mean of ranks"}
_NO_METRICS = (LOSS, RATE, NORM, *_MACHINE, "peak_held")
_TITLES = {
    RATE: "learning rate",
    BUBBLE: "bubble",
    NORM: "gradient norm",
    **dict.fromkeys(THROUGHPUT, "throughput"),
}
#: For each list with a figure of every rank: title, name of a curve, unit, and factor.
_BY_RANK = {
    "busy_share_by_rank": ("busy share", "rank", "%", 100.0),
    "peak_memory_by_process": ("peak memory", "process", "GB", 1e-9),
}
#: The most points of a curve; of more, the least and the most of each stretch are drawn.
MOST_POINTS = 600
#: The number of colours; of more ranks the least, the median and the most are drawn.
MOST_COLOURS = 8
#: A curve of so many points has a running mean, over its points divided by ``_WINDOWS``.
_SMOOTH_FROM, _WINDOWS = 60, 40

_WIDTH = 1000
#: The least and the most width of a drawing, in pixels of CSS; a wide one is scrolled.
_PIXELS = (560, 1600)
_PIXELS_OF_A_BOX = 14.0
_PIXELS_OF_A_DIGIT = 7.0
#: In a timeline of more boxes those of one colour are one shape, without texts.
_MOST_BOXES = 2500
_TIME_UNITS = (("s", 1.0), ("ms", 1e3), ("µs", 1e6))
_KINDS = {"F": "F forward", "B": "B backward", "I": "I input gradient", "W": "W weight gradient"}


def short(value: float) -> str:
    """Formats a figure with four significant digits: 1,234  0.1235  1.235e-07."""
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 1e-4 <= abs(value) < 1e4:
        return f"{value:.4g}"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.3e}"


def align(values: Sequence[float]) -> list[str]:
    """Formats the figures of a column with equally many decimals, if that shows them all."""
    sizes = [abs(value) for value in values if value and math.isfinite(value)]
    if not sizes or max(sizes) >= 1e9 or min(sizes) < max(sizes) / 1e4 or max(sizes) < 1e-3:
        return [short(value) for value in values]
    digits = max(0, 3 - math.floor(math.log10(max(sizes))))
    return [f"{value:,.{digits}f}" if math.isfinite(value) else str(value) for value in values]


def percent(value: float) -> str:
    """Formats a share of 1 as a percentage."""
    # The sum turns -0.0 into 0.0.
    return f"{round(value, 3) + 0.0:.1%}"


def size(count: float) -> str:
    """Formats bytes in a fitting unit."""
    for unit in _BYTE_UNITS:
        if count < 1000 or unit == _BYTE_UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise ValueError(count)


def seconds(value: float) -> str:
    """Formats a duration in a fitting unit."""
    if 0 < value < 0.1:
        return f"{1000 * value:.3g} ms"
    if value < 10:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    minutes, left = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} days"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {left} s"


def moment(value: float) -> str:
    """Formats a moment in UTC."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(value))
    except (ValueError, OverflowError, OSError):
        return "at no known time"


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Returns round numbers between ``low`` and ``high``; at least one."""
    if not high > low:
        return [low]
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * one for one in _STEPS if power * one >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)] or [low]


def labels(values: Sequence[float]) -> list[str]:
    """Formats the numbers of an axis with as many digits as distinguish them."""
    most = max(map(abs, values), default=0.0)
    if most and not 1e-3 <= most < 1e6:
        return [f"{value:.3g}" for value in values]
    step = min((b - a for a, b in itertools.pairwise(values)), default=most)
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 3
    # 0.25 has a digit more than its size says.
    digits += any(abs(round(value, digits) - value) > abs(step) / 100 for value in values)
    return [f"{value:,.{min(digits, 6)}f}" for value in values]


class Curve(NamedTuple):
    """Figures by step.

    Attributes:
        name: The text in the legend.
        xs: Steps, ascending.
        ys: Figures; NaN and infinities are gaps.
        kind: ``line``, or ``points`` for a line with a dot at each figure.
        colour: 0 for training, 1 for evaluation; the position among several curves of one kind.
        times: Seconds since the run began, for each figure; empty if unknown.
        window: The number of figures of the running mean that is drawn too; 1 for none.
    """

    name: str
    xs: Sequence[int]
    ys: Sequence[float]
    kind: str = "line"
    colour: int = 0
    times: Sequence[float] = ()
    window: int = 1

    def thin(self) -> Curve:
        """Returns this curve with at most about ``MOST_POINTS`` of its points."""
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
        """The data of the page's script, with None for NaN and infinities."""
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
    """Returns the charts of throughput, bubble, times and shares; of a single run by rank too."""
    charts = list(_charts(runs, [*_MACHINE]))
    if len(runs) == 1:
        charts += chain.from_iterable(map(_charts_by_rank, runs.values()))
    return charts


def _charts(runs: Mapping[str, RunRecord], names: Sequence[str]) -> Iterator[Chart]:
    """Yields a chart for each figure that some run has; each of several runs has its colour."""
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
    """Returns a curve of many points with the length of its running mean set; others as given."""
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


@dataclass(frozen=True)
class Shape:
    """A box, or all boxes of one colour: class, outline, opacity, and the pointer's text."""

    kind: str
    outline: str
    opacity: str
    text: str = ""


@dataclass(frozen=True)
class Number:
    """The number of a micro-batch on a box, at a position in percent of width and height."""

    kind: str
    text: str
    left: str
    top: str


@dataclass(frozen=True)
class Track:
    """The predicted or the measured timeline: a row of boxes for each rank."""

    title: str
    ranks: int
    shapes: list[Shape]
    numbers: list[Number]


@dataclass(frozen=True)
class Drawing:
    """Timelines below each other, on one scale.

    Attributes:
        tracks: The predicted and the measured track, if they exist.
        pixels: The least width in pixels.
        kinds: The kinds of actions drawn, each with its text in the legend.
        shaded: Whether some boxes are paler, as of a later stage.
        numbered: Whether some boxes have numbers.
        marks: Labels of the axis of time, each with its share of the width in percent.
        unit: The unit of the times; empty if they are costs of 1.
    """

    tracks: list[Track]
    pixels: float
    kinds: dict[str, str]
    shaded: bool
    numbered: bool
    marks: list[tuple[str, str]]
    unit: str


def drawings(pipeline: Pipeline) -> list[Drawing]:
    """Lays out the timelines of a pipeline: a drawing for each traced step, or a single one."""
    costs = "with the median cost of each action" if pipeline.unit else "if F, I and W took as long"
    predicted = _panel(f"Predicted {costs}", pipeline, pipeline.predicted)
    count = len(pipeline.traced)
    titles = [f"Measured, step {number:,}" for number in pipeline.numbers] or ["Measured"]
    # A browser is slow on a page of many steps of many boxes each.
    most = min(_MOST_BOXES, 4 * _MOST_BOXES // max(1, count))
    return [
        laid_out([predicted, _panel(title, pipeline, events)], most)
        for title, events in zip(titles, pipeline.traced or [[]])
    ]


def _panel(title: str, pipeline: Pipeline, events: Sequence[Event]) -> Panel:
    bubble = percent(figures_of(events).bubble_rate) if events else ""
    return Panel(f"{title}: bubble {bubble}", events, pipeline.placement, pipeline.unit)


def laid_out(panels: Sequence[Panel], most_boxes: int = _MOST_BOXES) -> Drawing:
    """Lays out timelines below each other, in one unit of time.

    Args:
        panels: One or more, of as many ranks each.
        most_boxes: A timeline with more boxes joins those of one colour to one shape.
    """
    bars = [bar for panel in panels for bar in panel.bars]
    end = max((bar.right for bar in bars), default=1.0) or 1.0
    # The more boxes a rank has, the wider the drawing, within limits.
    boxes = max(len(panel.events) / panel.placement.ranks for panel in panels)
    pixels = min(max(_PIXELS[0], _PIXELS_OF_A_BOX * boxes), _PIXELS[1])
    tracks = [
        Track(
            panel.title,
            panel.placement.ranks,
            _shapes(panel, end, merged=len(panel.bars) > most_boxes),
            _numbers(panel, end, pixels)[:_MOST_BOXES],
        )
        for panel in panels
        if panel.bars
    ]
    marks, unit = _axis(panels[0].unit, end)
    return Drawing(
        tracks,
        pixels,
        {kind: text for kind, text in _KINDS.items() if any(bar.kind == kind for bar in bars)},
        any(bar.shade for bar in bars),
        any(track.numbers for track in tracks),
        marks,
        unit,
    )


def _shapes(panel: Panel, end: float, merged: bool) -> list[Shape]:
    """Returns a shape for each box, with its action and duration, or for each colour if merged."""
    if merged:
        outlines: dict[tuple[str, str], list[str]] = {}
        for bar in panel.bars:
            outlines.setdefault((bar.kind, _opacity(bar)), []).append(_outline(bar, end))
        return [Shape(kind, "".join(each), opacity) for (kind, opacity), each in outlines.items()]
    texts = (
        f"{name} on rank {event.rank}: {seconds(event.end - event.start)}"
        for event in panel.events
        for name in event.actions or [event.name]
    )
    return [
        Shape(bar.kind, _outline(bar, end), _opacity(bar), text)
        for bar, text in zip(panel.bars, texts)
    ]


def _opacity(bar: Bar) -> str:
    return f"{1 - 0.8 * bar.shade:g}"


def _outline(bar: Bar, end: float) -> str:
    left, right = (round(_WIDTH * x / end, 3) for x in (bar.left, bar.right))
    width, height = max(round(right - left, 3), 0), round(bar.bottom - bar.top, 3)
    return f"M{left:g} {round(bar.top, 3):g}h{width:g}v{height:g}h{-width:g}z"


def _numbers(panel: Panel, end: float, pixels: float) -> list[Number]:
    """Returns the numbers of micro-batches that fit into their boxes."""
    numbers = []
    for bar in panel.bars:
        needed = _PIXELS_OF_A_DIGIT * len(bar.number) + 3
        if bar.number and (bar.right - bar.left) / end * pixels >= needed:
            top = 100 * ((bar.top + bar.bottom) / 2 + 0.5) / panel.placement.ranks
            left = _share((bar.left + bar.right) / 2, end)
            numbers.append(Number(bar.kind, bar.number, left, f"{top:.4g}"))
    return numbers


def _share(value: float, end: float) -> str:
    return f"{100 * value / end:.5g}"


def _axis(unit: str, end: float) -> tuple[list[tuple[str, str]], str]:
    """Returns the labels of the axis, and the unit that they are in."""
    factor = 1.0
    if unit:
        unit, factor = next(
            one for one in _TIME_UNITS if end * one[1] >= 2 or one is _TIME_UNITS[-1]
        )
    marks = ticks(0, end * factor, 8)
    return [(text, _share(m / factor, end)) for text, m in zip(labels(marks), marks)], unit
