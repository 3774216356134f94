"""Draws events as a picture: a row for each rank, time to the right, one colour for each kind.

It also draws a profile: the time and memory of each layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from fleetpipe.contrib.pictures import COLOURS, HEIGHT, LANE, Bar, Panel, panel_of
from fleetpipe.errors import ConfigError
from fleetpipe.extras import needed_for
from fleetpipe.profiling.cost_model import LayerCost
from fleetpipe.schedules.simulation import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


#: By the ending of a file the metadata that are left out, so that the same picture has equal files.
_UNSTABLE_METADATA = {".png": "Software", ".svg": "Date", ".pdf": "CreationDate"}

_LABELS = {
    "F": "F  forward",
    "B": "B  backward",
    "I": "I  input gradient",
    "W": "W  weight gradient",
    "other": "other",
}

_WIDTH_RANGE = (9.0, 16.0)  # the least and the most width of a picture
_NUMBER_SIZES = (6.0, 9.0)  # the least and the most size of a number
_MOST_HALF_BOX_SIZE = 7.0  # the most size of a number in half a box
_MARGIN_INCHES = 1.1  # inches beside the rows
_DIGIT_WIDTH = 0.64  # the width of a digit over its size
_MOST_NUMBERS = 8000  # with more boxes no numbers are drawn
_DPI = 130.0
#: The hatches of kinds whose colour looks like another's on grey paper.
HATCHES = {"I": "////", "W": "----"}
#: The colour and the hatch of the part of a box in which its rank waits for an exchange.
_EXCHANGE, _EXCHANGE_HATCH = "#e6e6e6", "...."
_HATCH_LINE = 0.4  # the width of a hatch's lines, in points
_HATCH_COLOUR = "#1a1a1a"
_LEAST_HATCHED_WIDTH = 4.0  # the least width of a box with a hatch, in points
_HELD_ROWS = 3.0  # the height of the curves of held amounts, in rows

#: Units of time, and how many there are in a second; and units of memory, of 1024 each.
_TIME_UNITS = (("s", 1.0), ("ms", 1e3), ("µs", 1e6))
_BYTE_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")

#: With more layers the axis has numbers alone.
_MOST_NAMES = 48
_MOST_INCHES = 24.0


class Picture(str):
    """A picture as SVG text, which a notebook shows."""

    def _repr_svg_(self) -> str:
        return self

    def __repr__(self) -> str:
        return f"<picture of {len(self)} characters>"


def plot(
    timeline: Timeline,
    path: str | Path | None = None,
    *,
    size: tuple[float, float] | None = None,
    title: str | None = None,
    dpi: float = _DPI,
    axes: Axes | None = None,
    window: tuple[float, float] | None = None,
    memory: bool = False,
) -> Picture | None:
    """Draws a simulated schedule into a file, or into given axes, in the style of :func:`draw`.

    Args:
        timeline: A result of :meth:`Schedule.simulate`.
        path: File to write: .png, .svg or .pdf. None: draws into ``axes``; without these either,
            returns the picture, which a notebook shows.
        size: Width and height in inches; by default large enough for the numbers in the boxes.
        title: Replaces the schedule's name, sizes, bubble and peak.
        dpi: Dots in an inch, of a .png.
        axes: Axes of matplotlib to draw into, without a legend; not together with ``path``.
        window: Begin and end of the part to draw, in the unit of the costs.
        memory: Whether to draw below how much each rank holds, in bytes if the costs give them; not
            together with ``axes``.

    Returns:
        The picture, an SVG, if there is neither path nor axes.

    Raises:
        ConfigError: The file has another ending; both ``path`` and ``axes`` are given; nothing runs
            within the window.
        PackageNotFound: matplotlib is not installed.
    """
    panel = panel_of(timeline, memory=memory)
    panel = panel if title is None else replace(panel, title=title)
    panel = panel if window is None else panel.within(*window)
    if axes is not None and path is None and not memory:
        begin, end = _time_limits([panel])
        inches = axes.get_window_extent().width / axes.figure.dpi
        _draw_panel(axes, panel, 72 * inches / (end - begin))
        axes.set_xlim(begin, end)
        _draw_axis(axes, panel.unit, end - begin)
    elif axes is None:
        with TemporaryDirectory() as folder:
            file = Path(folder) / "timeline.svg" if path is None else path
            draw([panel], file, size=size, dpi=dpi)
            if path is None:
                return Picture(Path(file).read_text(encoding="utf-8"))
    else:
        raise ConfigError(
            "a schedule is drawn into one place",
            expected="plot(timeline, path), or plot(timeline, axes=..) without memory=True",
            got=f"path={str(path)!r}, axes={axes!r}, memory={memory}",
            fix="give one of path and axes",
        )
    return None


def draw(
    panels: Sequence[Panel],
    path: str | Path,
    *,
    size: tuple[float, float] | None = None,
    dpi: float = _DPI,
) -> None:
    """Draws timelines below each other on one scale, such as measured beside predicted.

    Colours and hatches show the kind, so that it can be recognized on grey paper too. A lighter
    colour is a later stage of the same rank; from three stages on, each is also drawn lower than
    the one before. The numbers in boxes are micro-batches, where there is room. A fused pair is one
    box with its parts above each other. The part at a box's right end in which its rank only waits
    for exchanges is dotted: in a fused pair the part that its halves do not hide. Seconds are shown
    in a unit that fits the longest timeline. No display is needed.

    Args:
        panels: One timeline or more, in one unit of time.
        path: File to write; its ending, .png, .svg or .pdf, decides the form.
        size: Width and height in inches; by default large enough for the numbers in the boxes.
        dpi: Dots in an inch, of a .png.

    Raises:
        ConfigError: Another ending.
        PackageNotFound: matplotlib is not installed.
    """
    width, height = size or _picture_size(panels)
    letters = 7 + min(width, _WIDTH_RANGE[1]) / 3
    # Each panel, and below it the amounts that its ranks hold, with a function and a height.
    areas: list[tuple[Panel, Callable[[Axes, Panel, float], None], float]] = []
    for panel in panels:
        areas.append((panel, _draw_panel, float(panel.placement.ranks)))
        if panel.held:
            areas.append((panel, _draw_held_amounts, _HELD_ROWS))
    with new_figure(path, width, height, letters, dpi) as figure:
        ratios = [share for _, _, share in areas]
        axes = figure.subplots(len(areas), 1, squeeze=False, sharex=True, height_ratios=ratios)
        begin, end = _time_limits(panels)
        for (panel, draw_area, _), area in zip(areas, axes[:, 0]):
            draw_area(area, panel, 72 * (width - _MARGIN_INCHES) / (end - begin))
            area.set_xlim(begin, end)
        _draw_axis(axes[-1, 0], panels[-1].unit, end - begin)
        _draw_legend(figure, panels, letters)


@contextmanager
def new_figure(
    path: str | Path, width: float, height: float, letters: float, dpi: float = _DPI
) -> Iterator[Figure]:
    """Yields an empty figure, which is written at the end. No display is needed.

    Args:
        path: File to write; its ending, .png, .svg or .pdf, decides the form.
        width: Width in inches.
        height: Height in inches.
        letters: Size of the letters, in points.
        dpi: Dots in an inch, of a .png.

    Raises:
        ConfigError: Another ending.
        PackageNotFound: matplotlib is not installed.
    """
    suffix = Path(path).suffix
    if suffix not in _UNSTABLE_METADATA:
        raise ConfigError(
            f"cannot draw {str(path)!r}",
            expected=f"a file that ends in {', '.join(_UNSTABLE_METADATA)}",
            fix="end the name of the file with one of these",
        )
    with needed_for("a picture is drawn"):
        import matplotlib as mpl
        from matplotlib.figure import Figure
    # Text stays text in an SVG, and the same picture gives the same file.
    with mpl.rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "fleetpipe",
            "font.size": letters,
            "hatch.linewidth": _HATCH_LINE,
        }
    ):
        figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
        yield figure
        figure.savefig(path, metadata={_UNSTABLE_METADATA[suffix]: None})


def _time_limits(panels: Sequence[Panel]) -> tuple[float, float]:
    """Returns the begin and the end of the time axis."""
    begin = min((panel.begin for panel in panels), default=0.0)
    end = max((bar.right for panel in panels for bar in panel.bars), default=begin)
    return begin, end if end > begin else begin + 1


def _typical_width(panel: Panel) -> float:
    """Returns the width that 95 % of the numbered boxes have at least."""
    widths = sorted(bar.right - bar.left for bar in panel.bars if bar.number)
    return widths[len(widths) // 20] if widths else 0


def _most_digits(panel: Panel) -> int:
    """Returns the number of digits of the longest number in a panel."""
    return max((len(bar.number) for bar in panel.bars), default=1)


def _picture_size(panels: Sequence[Panel]) -> tuple[float, float]:
    """Returns width and height in inches: wide enough for the numbers, and a line for each rank."""
    begin, end = _time_limits(panels)
    width = _WIDTH_RANGE[0]
    for panel in panels:
        boxes = (end - begin) / (_typical_width(panel) or end - begin)
        needed = (
            _MARGIN_INCHES
            + boxes * (_DIGIT_WIDTH * _most_digits(panel) * _NUMBER_SIZES[0] + 1.2) / 72
        )
        width = max(width, min(needed, _WIDTH_RANGE[1]))
    ranks = [panel.placement.ranks for panel in panels]
    row = 0.36 if max(ranks) <= 16 else 0.24
    if any(panel.has_lanes for panel in panels):
        row *= 1.5
    held = sum(_HELD_ROWS * 0.36 for panel in panels if panel.held)
    return width, 0.9 + held + sum(row * count + 0.5 for count in ranks)


def _draw_axis(area: Axes, unit: str, length: float) -> None:
    """Labels the axis of time; for "s" the label's unit fits ``length``, such as "ms"."""
    if unit == "s":
        fitting = ((name, factor) for name, factor in _TIME_UNITS if length * factor >= 2)
        unit, factor = next(fitting, _TIME_UNITS[-1])
        area.xaxis.set_major_formatter(lambda seconds, _: f"{seconds * factor:g}")
    area.set_xlabel(f"time ({unit})" if unit else "time", fontsize="small")


def _draw_panel(area: Axes, panel: Panel, scale: float) -> None:
    """Draws boxes and numbers; ``scale`` is points in one unit of time."""
    from matplotlib.collections import PolyCollection

    usual = _typical_width(panel) * scale
    waits = [bar for bar in panel.bars if bar.exchange]
    area.add_collection(
        PolyCollection(
            [_corners(bar, bar.computed) for bar in waits],
            hatch=_EXCHANGE_HATCH if usual >= _LEAST_HATCHED_WIDTH else None,
            facecolors=_EXCHANGE,
            edgecolors=_HATCH_COLOUR,
            linewidths=0,
            zorder=1.7,
        )
    )
    for kind in COLOURS:
        bars = [bar for bar in panel.bars if bar.kind == kind]
        corners = [_corners(bar, bar.left) for bar in bars]
        line = max(0.1, min(0.7, usual / 12))
        if kind in HATCHES and usual >= _LEAST_HATCHED_WIDTH:
            # In a second box, because the lines of a hatch have the colour of the box's edge.
            hatched = PolyCollection(
                corners,
                hatch=HATCHES[kind],
                facecolors="none",
                edgecolors=_HATCH_COLOUR,
                linewidths=0,
                zorder=1.5,
            )
            area.add_collection(hatched, autolim=False)
        colours = [bar.colour for bar in bars]
        area.add_collection(
            PolyCollection(corners, facecolors=colours, edgecolors="white", linewidths=line)
        )
    ranks = panel.placement.ranks
    area.set_ylim(ranks - 0.4, -0.6)
    area.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    area.tick_params(labelsize="small")
    area.tick_params(axis="y", length=0)
    area.spines[["top", "right", "left"]].set_visible(False)
    area.set_title(panel.title, fontsize="medium", loc="left")
    _draw_numbers(area, panel, scale)


def _corners(bar: Bar, left: float) -> tuple[tuple[float, float], ...]:
    """Returns the corners of a box whose left end is at ``left``."""
    right, top, bottom = bar.right, bar.top, bar.bottom
    return (left, top), (right, top), (right, bottom), (left, bottom)


def _draw_numbers(area: Axes, panel: Panel, scale: float) -> None:
    """Writes a micro-batch's number into each box that is large enough, all in one size.

    ``scale`` is the number of points in one unit of time.
    """
    least, most = _NUMBER_SIZES
    numbered = [bar for bar in panel.bars if bar.number]
    size = min(most, (_typical_width(panel) * scale - 1) / (_DIGIT_WIDTH * _most_digits(panel)))
    if size < least or len(numbered) > _MOST_NUMBERS:
        return
    for bar in numbered:
        halved = bar.bottom - bar.top < LANE * HEIGHT - 0.01
        points = min(size, _MOST_HALF_BOX_SIZE) if halved else size
        if _DIGIT_WIDTH * len(bar.number) * points <= (bar.computed - bar.left) * scale:
            area.text(
                (bar.left + bar.computed) / 2,
                (bar.top + bar.bottom) / 2,
                bar.number,
                fontsize=points,
                color=bar.ink,
                horizontalalignment="center",
                verticalalignment="center_baseline",
                bbox={"facecolor": bar.colour, "edgecolor": "none", "pad": 0.4}
                if bar.kind in HATCHES
                else None,
            )


def _draw_held_amounts(area: Axes, panel: Panel, scale: float) -> None:
    """Draws the amount that each rank holds over time: a line for each rank, the first darkest."""
    most = max(amount for steps in panel.held for _, amount in steps)
    name, unit = panel.held_unit, 1.0
    if name == "bytes":
        power = min(int(math.log(max(most, 1), 1024)), len(_BYTE_UNITS) - 1)
        name, unit = _BYTE_UNITS[power], 1024.0**power
    for rank, steps in enumerate(panel.held):
        grey = 0.75 * rank / max(1, len(panel.held) - 1)
        label = f"rank {rank}" if rank in (0, len(panel.held) - 1) else None
        times, amounts = zip(*steps)
        heights = [amount / unit for amount in amounts]
        area.step(times, heights, where="post", color=str(grey), linewidth=1.2, label=label)
    area.set_ylim(0, 1.1 * most / unit or 1)
    area.set_ylabel(f"held ({name})", fontsize="small")
    area.tick_params(labelsize="small")
    area.spines[["top", "right"]].set_visible(False)
    area.legend(fontsize="small", frameon=False, loc="upper right")


def _draw_legend(figure: Figure, panels: Sequence[Panel], letters: float) -> None:
    """Draws a legend of the colours, with as many lines as the picture's width requires."""
    from matplotlib.patches import Patch

    bars = [bar for panel in panels for bar in panel.bars]
    present = {bar.kind for bar in bars}
    boxes = [
        Patch(
            facecolor=COLOURS[kind],
            label=label,
            hatch=HATCHES.get(kind),
            edgecolor=_HATCH_COLOUR if kind in HATCHES else None,
            linewidth=0,
        )
        for kind, label in _LABELS.items()
        if kind in present
    ]
    if any(bar.exchange for bar in bars):
        boxes.append(
            Patch(
                facecolor=_EXCHANGE,
                label="waits for an exchange",
                hatch=_EXCHANGE_HATCH,
                edgecolor=_HATCH_COLOUR,
                linewidth=0,
            )
        )
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


def draw_layers(layers: Sequence[LayerCost], path: str | Path) -> None:
    """Draws the time and memory of layers, and of the loss after them, for ``Profile.plot``."""
    width = min(max(6.0, 0.3 * len(layers) + 1.5), _MOST_INCHES)
    with new_figure(path, width, 5.5, 9) as figure:
        times, bytes_held = figure.subplots(2, 1, sharex=True)
        milliseconds = {
            "F": [1e3 * layer.forward for layer in layers],
            "B": [0.0 if layer.splits else 1e3 * layer.whole for layer in layers],
            "I": [1e3 * (layer.input_grad or 0) if layer.splits else 0.0 for layer in layers],
            "W": [1e3 * (layer.weight_grad or 0) if layer.splits else 0.0 for layer in layers],
        }
        _draw_stacked_bars(times, milliseconds, {kind: COLOURS[kind] for kind in milliseconds})
        times.set_ylabel("ms")
        times.set_title("time and memory of a micro-batch, by layer", loc="left")
        mib = 2.0**20
        held = {
            "parameters": [layer.parameters / mib for layer in layers],
            "held until backward": [layer.held / mib for layer in layers],
        }
        _draw_stacked_bars(bytes_held, held, {"parameters": "0.35", "held until backward": "0.75"})
        bytes_held.set_ylabel("MiB")
        if len(layers) <= _MOST_NAMES:
            names = [f"{number} {layer.name}" for number, layer in enumerate(layers)]
            bytes_held.set_xticks(range(len(layers)), names, rotation=90)


def _draw_stacked_bars(
    area: Axes, rows: dict[str, list[float]], colours: dict[str, tuple[float, float, float] | str]
) -> None:
    """Draws a bar for each layer, made of parts on top of each other, and a legend.

    By the name of a part, ``rows`` has its height for each layer, and ``colours`` its colour. Parts
    that are always 0 are left out of the legend.
    """
    bottoms = [0.0] * len(next(iter(rows.values())))
    for name, heights in rows.items():
        if any(heights):
            positions = range(len(heights))
            area.bar(
                positions,
                heights,
                bottom=bottoms,
                color=colours[name],
                hatch=HATCHES.get(name),
                edgecolor="white",
                label=name,
            )
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights)]
    area.legend(fontsize="small", frameon=False)
    area.spines[["top", "right"]].set_visible(False)
