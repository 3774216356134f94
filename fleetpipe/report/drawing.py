"""Draws what ran on each rank, and when: boxes in an SVG, numbers and names beside it as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fleetpipe.report.markup import Element, element
from fleetpipe.report.numbers import labels, percent, ticks
from fleetpipe.report.timelines import Pipeline
from fleetpipe.schedules.forms.events import Event, figures_of
from fleetpipe.schedules.forms.picture import Bar, Panel

_WIDTH = 1000
#: Least width of a picture that is scrolled, and most, in pixels of CSS.
_PIXELS = (560, 1600)
_PIXELS_OF_A_BOX = 14.0
_PIXELS_OF_A_DIGIT = 7.0
#: Above this number of boxes those of one colour are one shape, without a text for the pointer.
_MOST_BOXES = 2500
_UNITS = (("s", 1.0), ("ms", 1e3), ("µs", 1e6))
_KINDS = {
    "F": "F forward",
    "B": "B backward",
    "I": "I input gradient",
    "W": "W weight gradient",
}


def drawing(pipeline: Pipeline) -> Element:
    """Draws the timelines of a pipeline below each other, to one scale."""
    events = {"predicted": pipeline.predicted, "measured": pipeline.measured}
    shown = {name: Panel(name, found, pipeline.placement) for name, found in events.items()}
    panels = {name: panel for name, panel in shown.items() if panel.bars}
    bars = [bar for panel in panels.values() for bar in panel.bars]
    end = max((bar.right for bar in bars), default=1.0) or 1.0
    pixels = _pixels(pipeline)
    return element(
        "figure",
        _legend(bars, any(_fits(bar, end, pixels) for bar in bars)),
        element(
            "div",
            *(
                part
                for name, panel in panels.items()
                for part in _panel(_title(name, pipeline, events[name]), panel, end, pixels)
            ),
            _axis(pipeline.unit, end),
            class_="scroll",
            style=f"--least:{pixels:.0f}px",
            tabindex="0",
            role="region",
            aria_label="timelines of the ranks",
        ),
        class_="timelines",
    )


def _title(name: str, pipeline: Pipeline, events: Sequence[Event]) -> str:
    bubble = f"bubble {percent(figures_of(events).bubble_rate)}"
    if name == "measured":
        of = f", the last of {pipeline.steps} traced steps" if pipeline.steps > 1 else ""
        return f"Measured{of}: {bubble}"
    costs = "with the mean cost of each action" if pipeline.unit else "if F, I and W took as long"
    return f"Predicted {costs}: {bubble}"


def _panel(title: str, panel: Panel, end: float, pixels: float) -> Iterator[Element]:
    ranks = panel.placement.ranks
    drawn = element(
        "svg",
        *_boxes(panel, end),
        viewBox=f"0 -0.5 {_WIDTH} {ranks}",
        preserveAspectRatio="none",
        role="img",
        aria_label=title,
    )
    numbers = [bar for bar in panel.bars if bar.number and _fits(bar, end, pixels)]
    texts = (
        element(
            "span",
            bar.number,
            class_=f"number {bar.kind}",
            style=f"left:{_share((bar.left + bar.right) / 2, end)}%;"
            f"top:{100 * ((bar.top + bar.bottom) / 2 + 0.5) / ranks:.4g}%",
            aria_hidden="true",
        )
        for bar in numbers[:_MOST_BOXES]
    )
    yield element("h3", title)
    yield element("div", *(element("span", f"rank {r}") for r in range(ranks)), class_="names")
    yield element("div", drawn, *texts, class_="canvas", style=f"--ranks:{ranks}")


def _boxes(panel: Panel, end: float) -> Iterator[Element]:
    bars = panel.bars
    if len(bars) > _MOST_BOXES:
        shapes: dict[tuple[str, float], list[str]] = {}
        for bar in bars:
            x, y, width, height = _place(bar, end)
            path = f"M{x:g} {y:g}h{width:g}v{height:g}h{-width:g}z"
            shapes.setdefault((bar.kind, bar.shade), []).append(path)
        for (kind, shade), paths in shapes.items():
            yield element("path", class_=kind, d="".join(paths), fill_opacity=_opacity(shade))
        return
    for bar, text in zip(bars, _texts(panel)):
        x, y, width, height = _place(bar, end)
        yield element(
            "rect",
            element("title", text),
            class_=bar.kind,
            x=f"{x:g}",
            y=f"{y:g}",
            width=f"{width:g}",
            height=f"{height:g}",
            fill_opacity=_opacity(bar.shade),
        )


def _texts(panel: Panel) -> Iterator[str]:
    """Yields what the pointer finds on each box: the action, and how long it took."""
    for event in panel.events:
        for action in event.actions:
            yield f"{action} on rank {event.rank}: {_duration(event.end - event.start)}"


def _duration(value: float) -> str:
    unit, factor = next((one for one in _UNITS if value * one[1] >= 1), _UNITS[-1])
    return f"{value * factor:.3g} {unit}"


def _place(bar: Bar, end: float) -> tuple[float, float, float, float]:
    left, right = (round(_WIDTH * x / end, 3) for x in (bar.left, bar.right))
    return left, round(bar.top, 3), max(round(right - left, 3), 0), round(bar.bottom - bar.top, 3)


def _opacity(shade: float) -> str | None:
    return f"{1 - 0.8 * shade:g}" if shade else None


def _pixels(pipeline: Pipeline) -> float:
    """Returns a width that has room for the boxes of a rank, within reason."""
    boxes = len(pipeline.predicted) / pipeline.placement.ranks
    return min(max(_PIXELS[0], _PIXELS_OF_A_BOX * boxes), _PIXELS[1])


def _fits(bar: Bar, end: float, pixels: float) -> bool:
    return (bar.right - bar.left) / end * pixels >= _PIXELS_OF_A_DIGIT * len(bar.number) + 3


def _share(value: float, end: float) -> str:
    return f"{100 * value / end:.5g}"


def _axis(unit: str, end: float) -> Element:
    factor = 1.0
    if unit:
        unit, factor = next(one for one in _UNITS if end * one[1] >= 2 or one is _UNITS[-1])
    marks = ticks(0, end * factor, 8)
    texts = (
        element("span", text, style=f"left:{_share(mark / factor, end)}%")
        for text, mark in zip(labels(marks), marks)
    )
    return element(
        "div",
        element("div", *texts, class_="x", aria_hidden="true"),
        element("div", f"time ({unit})" if unit else "time", class_="axis"),
        class_="times",
    )


def _legend(bars: Sequence[Bar], numbered: bool) -> Element:
    present = {bar.kind for bar in bars}
    entries = [
        element("li", element("i", class_=f"key {kind}"), text)
        for kind, text in _KINDS.items()
        if kind in present
    ]
    if any(bar.shade for bar in bars):
        entries.append(element("li", "paler: a later stage of the rank"))
    if numbered:
        entries.append(element("li", "numbers: micro-batches"))
    return element("ul", *entries, class_="legend")
