"""Draws a profile: the time and memory of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fleetpipe.contrib.pictures.panel import COLOURS
from fleetpipe.contrib.pictures.schedule_picture import HATCHES, new_figure
from fleetpipe.profiling.cost_model import LayerCost

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: More layers have numbers in the place of names.
_MOST_NAMES = 48
_MOST_INCHES = 24.0


def draw_layers(layers: Sequence[LayerCost], path: str | Path) -> None:
    """Draws what ``Profile.plot`` shows of layers, and of the loss behind them."""
    width = min(max(6.0, 0.3 * len(layers) + 1.5), _MOST_INCHES)
    with new_figure(path, width, 5.5, 9) as figure:
        times, bytes_held = figure.subplots(2, 1, sharex=True)
        milliseconds = {
            "F": [1e3 * layer.forward for layer in layers],
            "B": [0.0 if layer.splits else 1e3 * layer.whole for layer in layers],
            "I": [1e3 * (layer.input_grad or 0) if layer.splits else 0.0 for layer in layers],
            "W": [1e3 * (layer.weight_grad or 0) if layer.splits else 0.0 for layer in layers],
        }
        _stack(times, milliseconds, {kind: COLOURS[kind] for kind in milliseconds})
        times.set_ylabel("ms")
        times.set_title("time and memory of a micro-batch, by layer", loc="left")
        mib = 2.0**20
        held = {
            "parameters": [layer.parameters / mib for layer in layers],
            "held until backward": [layer.held / mib for layer in layers],
        }
        _stack(bytes_held, held, {"parameters": "0.35", "held until backward": "0.75"})
        bytes_held.set_ylabel("MiB")
        if len(layers) <= _MOST_NAMES:
            names = [f"{number} {layer.name}" for number, layer in enumerate(layers)]
            bytes_held.set_xticks(range(len(layers)), names, rotation=90)


def _stack(
    area: Axes, rows: dict[str, list[float]], colours: dict[str, tuple[float, float, float] | str]
) -> None:
    """Draws bars on top of each other, without those that are always 0."""
    bottoms = [0.0] * len(next(iter(rows.values())))
    for name, heights in rows.items():
        if any(heights):
            places = range(len(heights))
            area.bar(
                places,
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
