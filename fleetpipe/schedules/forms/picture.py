"""Draws events as a picture: a row for each rank, time to the right, one colour for each kind."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fleetpipe.errors import ConfigError
from fleetpipe.extras import needed_for
from fleetpipe.schedules.forms.panel import COLOURS, HEIGHT, LANE, Panel, panel_of
from fleetpipe.schedules.simulation.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")

_LABELS = {
    "F": "F  forward",
    "B": "B  backward",
    "I": "I  input gradient",
    "W": "W  weight gradient",
    "other": "other",
}

_INCHES = (9.0, 16.0)  # least and most width of a picture
_POINTS = (6.0, 9.0)  # least and most size of a number; none is smaller than can be read
_HALF_POINTS = 7.0  # most size in half a box
_MARGIN = 1.1  # inches beside the rows
_DIGIT = 0.64  # width of a digit in shares of its size
_MOST_NUMBERS = 8000


def plot(timeline: Timeline, path: str | Path) -> None:
    """Draws a simulated schedule; see :func:`draw`."""
    draw([panel_of(timeline)], path)


def draw(panels: Sequence[Panel], path: str | Path) -> None:
    """Draws timelines below each other to one scale, measured beside predicted for example.

    Colours say the kind, and lighter ones a later stage of the same rank; from three stages on each
    also stands lower than the one before. Numbers are micro-batches where they fit. A fused pair is
    one box with its parts above each other. Seconds are shown in the unit that suits the longest
    timeline. No display is needed.

    Args:
        panels: One timeline or more, in one unit of time.
        path: File to write; its ending, .png or .svg, says the form.

    Raises:
        ConfigError: Another ending.
        PackageNotFound: matplotlib is not installed.
    """
    width, height = _size(panels)
    letters = 7 + width / 3
    with new_figure(path, width, height, letters) as figure:
        rows = [panel.placement.ranks for panel in panels]
        axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True, height_ratios=rows)
        for panel, area in zip(panels, axes[:, 0]):
            area.set_xlim(0, _end(panels))
            _draw_panel(area, panel, 72 * (width - _MARGIN) / _end(panels))
        _draw_axis(axes[-1, 0], panels[-1].unit, _end(panels))
        _draw_legend(figure, panels, letters)


@contextmanager
def new_figure(path: str | Path, width: float, height: float, letters: float) -> Iterator[Figure]:
    """Yields an empty figure, which is written in the end. No display is needed.

    Args:
        path: File to write; its ending, .png or .svg, says the form.
        width: In inches.
        height: In inches.
        letters: Size of the letters, in points.

    Raises:
        ConfigError: Another ending.
        PackageNotFound: matplotlib is not installed.
    """
    svg = _suffix(path) == ".svg"
    with needed_for("a picture is drawn"):
        import matplotlib as mpl
        from matplotlib.figure import Figure
    # Text stays text in an SVG, and the same picture gives the same file.
    with mpl.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "fleetpipe", "font.size": letters}
    ):
        figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
        yield figure
        figure.savefig(path, metadata={"Date": None} if svg else {"Software": None})


def _suffix(path: str | Path) -> str:
    suffix = Path(path).suffix
    if suffix not in SUFFIXES:
        raise ConfigError(
            f"cannot draw {str(path)!r}",
            expected=f"a file that ends in {' or '.join(SUFFIXES)}",
            fix="end the name of the file with one of these",
        )
    return suffix


def _end(panels: Sequence[Panel]) -> float:
    return max((bar.right for panel in panels for bar in panel.bars), default=0) or 1


def _usual_width(panel: Panel) -> float:
    """Returns the width of the narrower boxes, a few that are narrower still left aside."""
    widths = sorted(bar.right - bar.left for bar in panel.bars if bar.number)
    return widths[len(widths) // 20] if widths else 0


def _digits(panel: Panel) -> int:
    return max((len(bar.number) for bar in panel.bars), default=1)


def _size(panels: Sequence[Panel]) -> tuple[float, float]:
    """Returns inches: wide enough for the numbers, within reason, and a line for each rank."""
    width = max(_INCHES[0], *(_wanted_width(panel, _end(panels)) for panel in panels))
    ranks = [panel.placement.ranks for panel in panels]
    row = 0.36 if max(ranks) <= 16 else 0.24
    if any(panel.has_lanes for panel in panels):
        row *= 1.5
    return width, 0.9 + sum(row * count + 0.5 for count in ranks)


def _wanted_width(panel: Panel, end: float) -> float:
    boxes = end / (_usual_width(panel) or end)
    width = _MARGIN + boxes * (_DIGIT * _digits(panel) * _POINTS[0] + 1.2) / 72
    return min(width, _INCHES[1])


def _draw_axis(area: Axes, unit: str, end: float) -> None:
    """Labels the axis of time."""
    if unit == "s":
        unit, factor = next(one for one in _UNITS if end * one[1] >= 2 or one is _UNITS[-1])
        area.xaxis.set_major_formatter(lambda seconds, _: f"{seconds * factor:g}")
    area.set_xlabel(f"time ({unit})" if unit else "time", fontsize="small")


#: Units of time, and how many there are in a second.
_UNITS = (("s", 1.0), ("ms", 1e3), ("µs", 1e6))


def _draw_panel(area: Axes, panel: Panel, scale: float) -> None:
    """Draws boxes and numbers; ``scale`` is points in one unit of time."""
    from matplotlib.collections import PolyCollection

    corners = [
        ((b.left, b.top), (b.right, b.top), (b.right, b.bottom), (b.left, b.bottom))
        for b in panel.bars
    ]
    usual = _usual_width(panel) * scale
    area.add_collection(
        PolyCollection(
            corners,
            facecolors=[bar.colour for bar in panel.bars],
            edgecolors="white",
            linewidths=max(0.1, min(0.7, usual / 12)),
        )
    )
    ranks = panel.placement.ranks
    area.set_ylim(ranks - 0.4, -0.6)
    area.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    area.tick_params(labelsize="small")
    area.tick_params(axis="y", length=0)
    area.spines[["top", "right", "left"]].set_visible(False)
    area.set_title(panel.title, fontsize="medium", loc="left")
    _draw_numbers(area, panel, scale)


def _draw_numbers(area: Axes, panel: Panel, scale: float) -> None:
    """Writes micro-batches into the boxes that have room; all in one size."""
    least, most = _POINTS
    numbered = [bar for bar in panel.bars if bar.number]
    size = min(most, (_usual_width(panel) * scale - 1) / (_DIGIT * _digits(panel)))
    if size < least or len(numbered) > _MOST_NUMBERS:
        return
    for bar in numbered:
        halved = bar.bottom - bar.top < LANE * HEIGHT - 0.01
        points = min(size, _HALF_POINTS) if halved else size
        if _DIGIT * len(bar.number) * points <= (bar.right - bar.left) * scale:
            area.text(
                (bar.left + bar.right) / 2,
                (bar.top + bar.bottom) / 2,
                bar.number,
                fontsize=points,
                color="black" if sum(bar.colour) > 1.45 else "white",
                horizontalalignment="center",
                verticalalignment="center_baseline",
            )


def _draw_legend(figure: Figure, panels: Sequence[Panel], letters: float) -> None:
    """Explains the colours, in as many lines as the width of the picture asks for."""
    from matplotlib.patches import Patch

    bars = [bar for panel in panels for bar in panel.bars]
    present = {bar.kind for bar in bars}
    boxes = [
        Patch(facecolor=COLOURS[kind], label=label)
        for kind, label in _LABELS.items()
        if kind in present
    ]
    if any(bar.shade for bar in bars):
        lower = " and lower" if any(panel.has_lanes for panel in panels) else ""
        boxes.append(Patch(facecolor="#d9d9d9", label=f"lighter{lower}: a later stage of the rank"))
    if any(len(event.actions) > 1 for panel in panels for event in panel.events):
        boxes.append(Patch(facecolor="white", edgecolor="#808080", label="halves: fused"))
    # An entry is a box, as wide as five letters, and its text; letters are some 0.5 of their size.
    points = sum(5 + 0.52 * len(str(box.get_label())) for box in boxes) * 0.83 * letters
    lines = max(1, math.ceil(points / (72 * figure.get_figwidth())))
    figure.legend(
        handles=boxes,
        loc="outside lower center",
        ncols=math.ceil(len(boxes) / lines) or 1,
        fontsize="small",
        frameon=False,
    )
