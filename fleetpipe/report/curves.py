"""Curves of figures over the steps of a run, with as many points as a screen shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

#: Points of a curve that are drawn; of more, the least and the most of each stretch.
MOST_POINTS = 600
_SMOOTH_FROM = 60
_WINDOWS = 40


@dataclass(frozen=True)
class Curve:
    """Figures by step.

    Attributes:
        name: What the legend says.
        xs: Steps, ascending.
        ys: Figures; those that are no numbers leave gaps.
        kind: ``"line"``, ``"faint"`` for what another curve is the mean of, or ``"points"`` for a
            line with a dot at each figure.
        colour: 0 for what is trained, 1 for what is evaluated; of several curves alike their place.
        times: Seconds since the run began, for each figure; empty where that is not known.
    """

    name: str
    xs: Sequence[int]
    ys: Sequence[float]
    kind: str = "line"
    colour: int = 0
    times: Sequence[float] = ()

    @property
    def last(self) -> float:
        """The last figure."""
        return self.ys[-1]

    @property
    def gaps(self) -> int:
        """How many figures are no numbers."""
        return sum(not math.isfinite(y) for y in self.ys)

    def thinned(self) -> Curve:
        """Returns this curve with about as many points at most; each is one of its own."""
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
    """Returns a curve of many points faintly, and the mean of its last some points over it.

    A curve of few points stays as it is.
    """
    if len(curve.xs) < _SMOOTH_FROM:
        return [curve]
    window = max(5, len(curve.xs) // _WINDOWS)
    means = _means(curve.ys, window)
    return [replace(curve, kind="faint"), replace(curve, name=f"mean of {window}", ys=means)]


def _means(values: Sequence[float], window: int) -> list[float]:
    """Returns the mean of the last ``window`` values at each place, as far as there are numbers."""
    means, total, count = [], 0.0, 0
    for place, value in enumerate(values):
        if math.isfinite(value):
            total, count = total + value, count + 1
        if place >= window and math.isfinite(values[place - window]):
            total, count = total - values[place - window], count - 1
        means.append(total / count if count and math.isfinite(value) else math.nan)
    return means
