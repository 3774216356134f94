"""Draws a capture: its nodes in columns, in the order in which they run, coloured by stage.

What crosses from stage to stage is drawn strong, with its bytes; other values are thin lines.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fleetpipe.capture.tracing.value import Trace, ValueId
from fleetpipe.schedules.forms.picture import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Those of Okabe and Ito, lighter: told apart by the colour-blind, and black can be read on them.
_COLOURS = ("#8fc7e8", "#f5c56b", "#86d1b3", "#e6b3cf", "#f2a27f", "#f4ec9a", "#9fb6d9", "#cfcfcf")
_ROWS = 40  # most nodes of a column
_BOX, _PITCH = 4.4, 6.2  # width of a box, and from column to column, in inches
_ROW = 0.27  # height of a row, in inches
_LETTERS = 46  # most of a name in a box

_Point = tuple[float, float]


class _Line(NamedTuple):
    """A value on its way: from a row to a row; 0 is the inputs, and the last the outputs."""

    value: ValueId
    source: int
    target: int
    crosses: bool


def draw(trace: Trace, starts: Sequence[int], path: str | Path) -> None:
    """Draws a run of a forward.

    Args:
        trace: The run.
        starts: The first node of each stage but stage 0; none for a model that is not cut.
        path: File to write; its ending, .png or .svg, says the form.

    Raises:
        ConfigError: Another ending, or matplotlib is not installed.
    """
    stages = [bisect_right(starts, number) for number in range(len(trace.nodes))]
    stages = [0, *stages, len(starts)]
    columns = -(-len(stages) // _ROWS)
    rows = min(len(stages), _ROWS)
    width, height = columns * _PITCH, (rows + 2) * _ROW + 0.5
    with new_figure(path, width, height, 8) as figure:
        area = figure.add_subplot()
        area.set_axis_off()
        area.set_xlim(-0.2, width - 0.2)
        area.set_ylim(-rows - 0.5, 1.2)
        for line in _lines(trace, stages):
            _draw_line(area, line, _size(trace.likes[line.value].nbytes))
        for row, (name, stage) in enumerate(zip(_names(trace), stages)):
            _draw_box(area, row, name, _COLOURS[stage % len(_COLOURS)])
        _draw_legend(area, trace, stages)


def _names(trace: Trace) -> Iterator[tuple[str, str]]:
    """Yields what stands in each box, at the left and at the right."""

    def shapes(values: Sequence[ValueId]) -> str:
        first = ", ".join(str(trace.likes[value]) for value in values[:1])
        return first + (f" +{len(values) - 1}" if len(values) > 1 else "")

    yield "inputs", shapes(trace.input_values)
    for node in trace.nodes:
        yield node.name, shapes(node.outputs)
    yield "outputs", shapes(trace.output_values)


def _lines(trace: Trace, stages: Sequence[int]) -> Iterator[_Line]:
    takers = [node.uses for node in trace.nodes]
    told: set[tuple[ValueId, int]] = set()
    for row, uses in enumerate([*takers, set(trace.output_values)], start=1):
        for value in sorted(uses):
            maker = trace.maker(value)
            source = 0 if maker is None else maker + 1
            # A value crosses once to each stage, whatever nodes take it there.
            crosses = stages[source] != stages[row] and (value, stages[row]) not in told
            if crosses:
                told.add((value, stages[row]))
            yield _Line(value, source, row, crosses)


def _corner(row: int) -> _Point:
    """Returns the middle of the left side of a box."""
    return row // _ROWS * _PITCH, -(row % _ROWS)


def _draw_box(area: Axes, row: int, name: tuple[str, str], colour: str) -> None:
    from matplotlib.patches import Rectangle

    (x, y), (left, right) = _corner(row), name
    room = _LETTERS - len(right)
    left = left if len(left) <= room else ".." + left[len(left) - room + 2 :]
    box = Rectangle((x, y - 0.36), _BOX, 0.72, facecolor=colour, edgecolor="#555555", linewidth=0.5)
    area.add_patch(box).set_zorder(2)
    area.text(x + 0.08, y, left, va="center", zorder=3)
    area.text(x + _BOX - 0.08, y, right, va="center", ha="right", zorder=3, size=7, alpha=0.65)


def _draw_line(area: Axes, line: _Line, size: str) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    (x, y), (to_x, to_y) = _corner(line.source), _corner(line.target)
    near = line.target == line.source + 1 and x == to_x
    if near:
        points = [(x + _BOX / 2, y - 0.36), (to_x + _BOX / 2, to_y + 0.36)]
        codes = [Curve.MOVETO, Curve.LINETO]
    else:
        # In one column a bow at the right, the wider the longer; else from right to left.
        bow = min(0.15 + 0.05 * (line.target - line.source), _PITCH - _BOX - 0.4)
        end = (to_x + _BOX, to_y) if x == to_x else (to_x, to_y)
        away = end[0] + bow if x == to_x else end[0] - 0.5
        points = [(x + _BOX, y), (x + _BOX + bow, y), (away, to_y), end]
        codes = [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4]
    colour, width = ("#b00020", 1.6) if line.crosses else ("#777777", 0.5)
    style = {"edgecolor": colour, "linewidth": width, "facecolor": "none"}
    area.add_patch(PathPatch(Curve(points, codes), zorder=4 if line.crosses else 1, **style))
    if line.crosses:
        # Beside where it ends, so that what goes to several places is told at each.
        place = (
            (points[-1][0] + 0.1, points[-1][1] + 0.1)
            if near or x == to_x
            else (
                points[-1][0] - 0.1,
                points[-1][1] + 0.3,
            )
        )
        side = "left" if near or x == to_x else "right"
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}
        area.text(*place, size, color=colour, ha=side, va="center", zorder=5, size=7, bbox=box)


def _draw_legend(area: Axes, trace: Trace, stages: Sequence[int]) -> None:
    from matplotlib.patches import Patch

    counts = [stages[1:-1].count(stage) for stage in range(stages[-1] + 1)]
    if len(counts) > 1:
        boxes = [
            Patch(color=_COLOURS[stage % len(_COLOURS)], label=f"stage {stage}: {count} nodes")
            for stage, count in enumerate(counts)
        ]
        area.legend(handles=boxes, loc="upper left", ncols=len(counts), frameon=False)


def _size(count: int) -> str:
    """Returns a number of bytes as text."""
    power = min(max(count.bit_length() - 1, 0) // 10, 3)
    return f"{count / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB')[power]}"
