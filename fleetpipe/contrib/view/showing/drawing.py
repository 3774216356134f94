"""Computes the drawings of a page: the charts of a run, and the timelines of its ranks.

It formats numbers, chooses which curves share a chart, and where an axis has ticks. The page's
script draws the charts (``learning``, ``machine``), ``templates/timelines.html`` the timelines
(``drawings``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from statistics import median
from typing import Any, NamedTuple

from fleetpipe.contrib.pictures import Bar, Panel
from fleetpipe.contrib.view.board import RunRecord, Series
from fleetpipe.contrib.view.history import EVALUATED
from fleetpipe.contrib.view.traced_ops import Pipeline
from fleetpipe.schedules.forms.trace import Event, figures_of

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

#: The width of a timeline in the unit of its SVG.
_WIDTH = 1000
#: The least and the most width of a drawing, in pixels of CSS; a wide one is scrolled.
_PIXELS = (560, 1600)
_PIXELS_OF_A_BOX = 14.0
_PIXELS_OF_A_DIGIT = 7.0
#: In a timeline of more boxes those of one colour are one shape, without texts.
_MOST_BOXES = 2500
_KINDS = {"F": "F forward", "B": "B backward", "I": "I input gradient", "W": "W weight gradient"}


def format_figure(value: float) -> str:
    """Formats a figure with four significant digits: 1,234  0.1235  1.235e-07."""
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 1e-4 <= abs(value) < 1e4:
        return f"{value:.4g}"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.3e}"


def format_column(values: Sequence[float]) -> list[str]:
    """Formats figures with equally many decimals, unless small figures would lose digits."""
    sizes = [abs(value) for value in values if value and math.isfinite(value)]
    if not sizes or max(sizes) >= 1e9 or min(sizes) < max(sizes) / 1e4 or max(sizes) < 1e-3:
        return [format_figure(value) for value in values]
    digits = max(0, 3 - math.floor(math.log10(max(sizes))))
    return [f"{value:,.{digits}f}" if math.isfinite(value) else str(value) for value in values]


def format_percent(value: float) -> str:
    """Formats a share of 1 as a percentage with one decimal."""
    # The sum turns -0.0 into 0.0.
    return f"{round(value, 3) + 0.0:.1%}"


def format_bytes(count: float) -> str:
    """Formats a number of bytes in a fitting unit: 334.0 MB."""
    power = min(int(math.log10(max(count, 1)) / 3), len(_BYTE_UNITS) - 1)
    return f"{count / 1000**power:.{1 if power else 0}f} {_BYTE_UNITS[power]}"


def format_duration(value: float) -> str:
    """Formats seconds in a fitting unit: 20 ms, 1.5 s, 3 min 20 s, 1 h 5 min, 3 days."""
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


def format_moment(value: float) -> str:
    """Formats seconds since 1970 as date and time in UTC."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(value))
    except (ValueError, OverflowError, OSError):
        return "at no known time"


class Curve(NamedTuple):
    """Figures by step.

    Attributes:
        name: The text in the legend.
        series: The figures, of which NaN and infinities are gaps.
        kind: ``line``, or ``points`` for a line with a dot at each figure.
        colour: 0 for training, 1 for evaluation; the index among several curves of one kind.
        window: The number of figures of the running mean that is drawn too; 1 for none.
    """

    name: str
    series: Series
    kind: str = "line"
    colour: int = 0
    window: int = 1


def thin_out(series: Series) -> Series:
    """Returns a series with about ``MOST_POINTS`` of its points at most.

    In each stretch of steps the least, the largest and the first NaN or infinite value stay.
    """
    count = len(series.steps)
    if count <= MOST_POINTS:
        return series
    length = math.ceil(2 * count / MOST_POINTS)
    indices = {0, count - 1}
    for start in range(0, count, length):
        stretch = range(start, min(start + length, count))
        gaps = [index for index in stretch if not math.isfinite(series.values[index])]
        finite = [index for index in stretch if math.isfinite(series.values[index])]
        by_value = sorted(finite, key=series.values.__getitem__)
        indices.update(gaps[:1] + by_value[:1] + by_value[-1:])
    remaining = sorted(indices)
    return Series(
        [series.steps[index] for index in remaining],
        [series.values[index] for index in remaining],
        [series.times[index] for index in remaining if series.times],
    )


class Chart(NamedTuple):
    """Some curves on one scale.

    Attributes:
        title: The name of the figures.
        unit: The unit of the figures.
        curves: At least one curve, each with at least one point.
        marks: Steps at which the run continued after a stop.
    """

    title: str
    unit: str
    curves: Sequence[Curve]
    marks: Sequence[int] = ()

    @property
    def script_data(self) -> dict[str, Any]:
        """The data of the page's script, with None for NaN and infinities."""
        curves = []
        for curve in self.curves:
            steps, values, times = thin_out(curve.series)
            ys = [value if math.isfinite(value) else None for value in values]
            points = {"xs": [*steps], "ys": ys, "times": [round(time, 3) for time in times]}
            look = {name: getattr(curve, name) for name in ("name", "kind", "colour", "window")}
            curves.append({**look, **points})
        return {"marks": [*self.marks], "curves": curves}


def title_of(name: str) -> str:
    """Returns the title of the chart of a figure."""
    return _TITLES.get(name, name)


def metric_names(run: RunRecord) -> list[str]:
    """Returns the names of the user's metrics, without the loss."""
    names = dict.fromkeys(name.removeprefix(EVALUATED) for name in run.series)
    return [name for name in names if name not in _NO_METRICS]


def learning_charts(runs: Mapping[str, RunRecord]) -> list[Chart]:
    """Returns the charts of loss, metrics, learning rate and gradient norm of some runs."""
    names = dict.fromkeys(name for run in runs.values() for name in metric_names(run))
    return list(_charts_of_figures(runs, [LOSS, *names, RATE, NORM]))


def machine_charts(runs: Mapping[str, RunRecord]) -> list[Chart]:
    """Returns charts of throughput, bubble, times and shares; for a single run also by rank."""
    charts = list(_charts_of_figures(runs, [*_MACHINE]))
    if len(runs) == 1:
        charts += chain.from_iterable(map(_charts_by_rank, runs.values()))
    return charts


def _charts_of_figures(runs: Mapping[str, RunRecord], names: Sequence[str]) -> Iterator[Chart]:
    """Yields a chart for each of the figures that some run has."""
    several = len(runs) > 1
    for name in names:
        curves: list[Curve] = []
        for number, (title, run) in enumerate(runs.items()):
            first, second = [number % MOST_COLOURS] * 2 if several else (0, 1)
            titles = (title, f"{title}, evaluation") if several else ("training", "evaluation")
            if name in run.series:
                series = run.series[name]
                if name == BUBBLE:
                    series = series._replace(values=[100 * value for value in series.values])
                window = 1 if several or name != LOSS else mean_window(len(series.steps))
                curves.append(Curve(titles[0], series, "line", first, window))
            if EVALUATED + name in run.series:
                curves.append(Curve(titles[1], run.series[EVALUATED + name], "points", second))
        if curves:
            marks = [] if several else _restart_steps(*runs.values())
            yield Chart(title_of(name), _MACHINE.get(name, ""), curves, marks)


def mean_window(count: int) -> int:
    """Returns the length of a running mean for a curve of ``count`` points; 1 for few points."""
    points = min(count, MOST_POINTS)
    return max(5, points // _WINDOWS) if points >= _SMOOTH_FROM else 1


def _charts_by_rank(run: RunRecord) -> Iterator[Chart]:
    """Yields a chart for each figure that a run has of every rank."""
    for name, (title, holder, unit, factor) in _BY_RANK.items():
        rows = [row for row in run.train if name in row.lists]
        lists = [[factor * number for number in row.lists[name]] for row in rows]
        count = min(map(len, lists), default=0)
        columns = {f"{holder} {rank}": [row[rank] for row in lists] for rank in range(count)}
        if count > MOST_COLOURS:
            columns = {
                f"least of {count}": [min(row) for row in lists],
                f"median of {count}": [median(row) for row in lists],
                f"most of {count}": [max(row) for row in lists],
            }
        steps, times = [row.step for row in rows], run.elapsed(rows)
        curves = [
            Curve(curve, Series(steps, values, times), "line", colour)
            for colour, (curve, values) in enumerate(columns.items())
        ]
        if curves:
            yield Chart(f"{title} by {holder}", unit, curves, _restart_steps(run))


def _restart_steps(run: RunRecord) -> list[int]:
    """Returns the steps after which a run was started again."""
    return [attempt.step for attempt in run.board.attempts[1:]]


class Track(NamedTuple):
    """A timeline: a row of boxes for each rank.

    Attributes:
        panel: The events, and where their boxes are.
        shapes: SVG paths of boxes that look alike, by kind, opacity and tooltip text.
        numbered: The boxes that have room for the number of their micro-batch.
    """

    panel: Panel
    shapes: Mapping[tuple[str, str, str], Sequence[str]]
    numbered: Sequence[Bar]


class Drawing(NamedTuple):
    """Timelines below each other, on one scale.

    Attributes:
        tracks: The timelines that have boxes: the predicted and the measured one, if they exist.
        end: When the last box ends.
        pixels: The least width in pixels.
        kinds: The kinds of actions drawn, each with its text in the legend.
        shaded: Whether some boxes are paler, which marks a later stage of a rank.
        marks: Labels of the axis of time, each with its position in percent of the width.
        unit: The unit of the labels; empty if the times are costs of 1.
    """

    tracks: Sequence[Track]
    end: float
    pixels: float
    kinds: Mapping[str, str]
    shaded: bool
    marks: Sequence[tuple[str, float]]
    unit: str


def timeline_drawings(pipeline: Pipeline) -> list[Drawing]:
    """Lays out the timelines of a pipeline: a drawing for each traced step, or a single one."""
    costs = "with the median cost of each action" if pipeline.unit else "if F, I and W took as long"
    predicted = _panel_with_bubble(f"Predicted {costs}", pipeline, pipeline.predicted)
    count = len(pipeline.traced)
    titles = [f"Measured, step {number:,}" for number in pipeline.numbers] or ["Measured"]
    # A browser is slow on a page of many steps of many boxes each.
    most = min(_MOST_BOXES, 4 * _MOST_BOXES // max(1, count))
    return [
        lay_out_timelines([predicted, _panel_with_bubble(title, pipeline, events)], most)
        for title, events in zip(titles, pipeline.traced or [[]])
    ]


def _panel_with_bubble(title: str, pipeline: Pipeline, events: Sequence[Event]) -> Panel:
    """Returns the panel of a timeline, with the bubble rate in its title."""
    bubble = format_percent(figures_of(events).bubble_rate) if events else ""
    return Panel(f"{title}: bubble {bubble}", events, pipeline.placement, pipeline.unit)


def lay_out_timelines(panels: Sequence[Panel], most_boxes: int = _MOST_BOXES) -> Drawing:
    """Lays out timelines below each other, in one unit of time.

    Args:
        panels: One or more, of as many ranks each.
        most_boxes: In a timeline with more boxes, those of one colour are joined to one shape.
    """
    bars = [bar for panel in panels for bar in panel.bars]
    end = max((bar.right for bar in bars), default=1.0) or 1.0
    # The more boxes a rank has, the wider the drawing, within limits.
    boxes = max(len(panel.events) / panel.placement.ranks for panel in panels)
    pixels = min(max(_PIXELS[0], _PIXELS_OF_A_BOX * boxes), _PIXELS[1])
    tracks = []
    for panel in panels:
        if panel.bars:
            numbered = [
                bar
                for bar in panel.bars
                if bar.number
                and (bar.right - bar.left) * pixels / end
                >= _PIXELS_OF_A_DIGIT * len(bar.number) + 3
            ]
            shapes = _outlines_by_look(panel, _WIDTH / end, joined=len(panel.bars) > most_boxes)
            tracks.append(Track(panel, shapes, numbered[:_MOST_BOXES]))
    in_milliseconds = panels[0].unit == "s" and end < 2
    scale = 1e3 if in_milliseconds else 1.0
    return Drawing(
        tracks,
        end,
        pixels,
        kinds={kind: _KINDS[kind] for kind in _KINDS if any(bar.kind == kind for bar in bars)},
        shaded=any(bar.shade for bar in bars),
        marks=[(format_figure(x), 100 * x / (scale * end)) for x in axis_marks(scale * end)],
        unit="ms" if in_milliseconds else panels[0].unit,
    )


def axis_marks(end: float) -> list[float]:
    """Returns 5 to 11 round numbers from 0 to ``end``, which is above 0."""
    power = 10.0 ** math.floor(math.log10(end))
    step = max(power / parts for parts in (1, 2, 5) if end >= 4 * power / parts)
    return [number * step for number in range(math.floor(end / step + 1e-9) + 1)]


def _outlines_by_look(
    panel: Panel, width: float, joined: bool
) -> dict[tuple[str, str, str], list[str]]:
    """Returns the outlines of the boxes of a timeline, by kind, opacity and text.

    Boxes with the same kind, opacity and text make one shape.

    Args:
        panel: The timeline.
        width: The width of a unit of time, in the unit of the SVG.
        joined: Whether to leave the text empty, so that there is one shape for each colour;
            otherwise the text is the action with its rank and its duration.
    """
    texts = (
        f"{name} on rank {event.rank}: {format_duration(event.end - event.start)}"
        for event in panel.events
        for name in event.actions or [event.name]
    )
    shapes: dict[tuple[str, str, str], list[str]] = {}
    for bar, text in zip(panel.bars, texts):
        key = bar.kind, f"{1 - 0.8 * bar.shade:g}", "" if joined else text
        left, right = f"{bar.left * width:.6g}", f"{bar.right * width:.6g}"
        outline = f"M{left} {bar.top:.3f}H{right}V{bar.bottom:.3f}H{left}z"
        shapes.setdefault(key, []).append(outline)
    return shapes
