"""Draws curves: lines in an SVG that takes the width there is, and text beside it that does not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fleetpipe.report.curves import Curve
from fleetpipe.report.markup import Element, data, element
from fleetpipe.report.numbers import labels, short, ticks

#: The drawing's own units; it is stretched to its place, with lines of one width.
_SIZE = 1000
_ROOM = 0.06
#: Figures that differ by less of their size are one; those that are smaller than this are zero.
_FLAT = 1e-9
_TINY = 1e-200

#: From a step or a figure to a place in the drawing.
Scale = Callable[[float], float]


def chart(
    title: str, curves: Sequence[Curve], unit: str = "", marks: Sequence[int] = ()
) -> Element:
    """Draws some curves to one scale.

    Args:
        title: What the figures are.
        curves: At least one, each with at least one point.
        unit: Of the figures.
        marks: Steps at which the run went on after a stop.

    Returns:
        A figure with a legend, which has the last figure of each curve.
    """
    gaps = max(curve.gaps for curve in curves)
    thin = [curve.thinned() for curve in curves]
    left, right = span = _span([x for curve in thin for x in curve.xs])
    shown = [x for x in marks if left <= x <= right]
    return element(
        "figure",
        _caption(title, thin, unit, bool(shown)),
        _plot(title, thin, span, shown),
        _gaps(gaps),
        data(_values(thin, span)),
        class_="chart",
    )


def _plot(
    title: str, curves: Sequence[Curve], span: tuple[int, int], marks: Sequence[int]
) -> Element:
    """Returns the lines, with the numbers of both axes around them."""
    left, right = span
    finite = [y for curve in curves for y in curve.ys if math.isfinite(y)] or [0.0]
    low, high = _range(min(finite), max(finite))

    def across(x: float) -> float:
        return round(_SIZE * (x - left) / (right - left), 2)

    def up(y: float) -> float:
        return round(_SIZE * (high - y) / (high - low), 2)

    rows = ticks(low, high)
    columns = [x for x in ticks(left, right) if x == int(x)]
    drawing = element(
        "svg",
        element("path", class_="grid", d="".join(f"M0 {up(y)}H{_SIZE}" for y in rows)),
        *(element("path", class_="mark", d=f"M{across(x)} 0V{_SIZE}") for x in marks),
        *(path for curve in curves for path in _paths(curve, across, up)),
        viewBox=f"0 0 {_SIZE} {_SIZE}",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{title} by step",
    )
    beside = (_label(text, f"top:{up(y) / 10:g}%") for text, y in zip(labels(rows), rows))
    below = (_label(f"{x:,.0f}", f"left:{across(x) / 10:g}%") for x in columns)
    return element(
        "div",
        element("div", *beside, class_="y", aria_hidden="true"),
        element("div", drawing, class_="area"),
        element("div", *below, class_="x", aria_hidden="true"),
        element("div", "step", class_="axis"),
        class_="plot",
    )


def _range(low: float, high: float) -> tuple[float, float]:
    """Returns the ends of the axis: a little room, and zero where it is near."""
    if high - low <= max(abs(low), abs(high), _TINY) * _FLAT:
        room = abs(low) / 2 if abs(low) > _TINY else 1.0
        return (0.0 if low > 0 else low - room), high + room
    room = (high - low) * _ROOM
    return (0.0 if 0 <= low < (high - low) / 2 else low - room), high + room


def _span(xs: Sequence[int]) -> tuple[int, int]:
    low, high = min(xs), max(xs)
    if 0 < low <= high * _ROOM:
        return 0, high
    return (low, high) if low < high else (low - 1, high + 1)


def _paths(curve: Curve, across: Scale, up: Scale) -> list[Element]:
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
    paths = [element("path", class_=f"{curve.kind} c{curve.colour}", d="".join(pieces))]
    if curve.kind == "points" or len(dots) == 1:
        paths.append(element("path", class_=f"dots c{curve.colour}", d="".join(dots)))
    return paths


def _caption(title: str, curves: Sequence[Curve], unit: str, marked: bool) -> Element:
    entries = [
        element(
            "li",
            element("i", class_=f"key {curve.kind} c{curve.colour}"),
            f"{curve.name} ",
            element("b", short(curve.last)),
        )
        for curve in curves
    ]
    if marked:
        entries.append(element("li", element("i", class_="key restart"), "went on after a stop"))
    heading = element("h3", title, element("small", f" {unit}") if unit else None)
    return element("figcaption", heading, element("ul", *entries, class_="legend"))


def _label(text: str, style: str) -> Element:
    return element("span", text, style=style)


def _gaps(gaps: int) -> Element | None:
    """Returns a line that says how many figures are not drawn."""
    if not gaps:
        return None
    what = "One figure is NaN or infinite" if gaps == 1 else f"{gaps} figures are NaN or infinite"
    return element("p", f"{what}: a gap in the curve.", class_="warning")


def _values(curves: Sequence[Curve], span: tuple[int, int]) -> dict[str, object]:
    """Returns what the page's script shows where the pointer is."""
    return {
        "span": span,
        "curves": [
            {
                "name": curve.name,
                "colour": curve.colour,
                "xs": list(curve.xs),
                # JSON has no NaN.
                "ys": [y if math.isfinite(y) else None for y in curve.ys],
            }
            for curve in curves
        ],
    }
