"""Computes the boxes of the ranks' timelines, which ``templates/timelines.html`` draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleetpipe.contrib.pictures.panel import Bar, Panel
from fleetpipe.contrib.view.reading.timelines import Pipeline
from fleetpipe.contrib.view.showing.numbers import labels, percent, seconds, ticks
from fleetpipe.schedules.forms.events import Event, figures_of

_WIDTH = 1000
#: Least width of a picture that is scrolled, and most, in pixels of CSS.
_PIXELS = (560, 1600)
_PIXELS_OF_A_BOX = 14.0
_PIXELS_OF_A_DIGIT = 7.0
#: Above this number of boxes those of one colour are one shape, without a text of each.
_MOST_BOXES = 2500
_UNITS = (("s", 1.0), ("ms", 1e3), ("µs", 1e6))
_KINDS = {"F": "F forward", "B": "B backward", "I": "I input gradient", "W": "W weight gradient"}


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
    # Many steps of many boxes each would be a page that no browser likes.
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
    # A width for the boxes of a rank, within reason.
    boxes = max(len(panel.events) / panel.placement.ranks for panel in panels)
    pixels = min(max(_PIXELS[0], _PIXELS_OF_A_BOX * boxes), _PIXELS[1])
    tracks = [
        Track(
            panel.title,
            panel.placement.ranks,
            _merge(panel, end) if len(panel.bars) > most_boxes else _shapes(panel, end),
            [_number(bar, end, panel) for bar in panel.bars if _fits(bar, end, pixels)][
                :_MOST_BOXES
            ],
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


def _shapes(panel: Panel, end: float) -> list[Shape]:
    """Returns a shape for each box, with the action and its duration as text."""
    texts = (
        f"{action} on rank {event.rank}: {seconds(event.end - event.start)}"
        for event in panel.events
        for action in event.actions
    )
    return [
        Shape(bar.kind, _outline(bar, end), _opacity(bar), text)
        for bar, text in zip(panel.bars, texts)
    ]


def _merge(panel: Panel, end: float) -> list[Shape]:
    outlines: dict[tuple[str, str], list[str]] = {}
    for bar in panel.bars:
        outlines.setdefault((bar.kind, _opacity(bar)), []).append(_outline(bar, end))
    return [Shape(kind, "".join(each), opacity) for (kind, opacity), each in outlines.items()]


def _outline(bar: Bar, end: float) -> str:
    left, right = (round(_WIDTH * x / end, 3) for x in (bar.left, bar.right))
    width, height = max(round(right - left, 3), 0), round(bar.bottom - bar.top, 3)
    return f"M{left:g} {round(bar.top, 3):g}h{width:g}v{height:g}h{-width:g}z"


def _opacity(bar: Bar) -> str:
    return f"{1 - 0.8 * bar.shade:g}"


def _number(bar: Bar, end: float, panel: Panel) -> Number:
    top = 100 * ((bar.top + bar.bottom) / 2 + 0.5) / panel.placement.ranks
    return Number(bar.kind, bar.number, _share((bar.left + bar.right) / 2, end), f"{top:.4g}")


def _fits(bar: Bar, end: float, pixels: float) -> bool:
    needed = _PIXELS_OF_A_DIGIT * len(bar.number) + 3
    return bool(bar.number) and (bar.right - bar.left) / end * pixels >= needed


def _share(value: float, end: float) -> str:
    return f"{100 * value / end:.5g}"


def _axis(unit: str, end: float) -> tuple[list[tuple[str, str]], str]:
    """Returns the labels of the axis, and the unit that they are in."""
    factor = 1.0
    if unit:
        unit, factor = next(one for one in _UNITS if end * one[1] >= 2 or one is _UNITS[-1])
    marks = ticks(0, end * factor, 8)
    return [(text, _share(m / factor, end)) for text, m in zip(labels(marks), marks)], unit
