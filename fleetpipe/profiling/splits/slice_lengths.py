"""Lengths of slices with equal costs, although later slices attend to more positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from fleetpipe.errors import ConfigError, require_whole


def balanced(lengths: Sequence[int], times: Sequence[float], slices: int) -> tuple[int, ...]:
    """Returns the lengths of slices of the same sequences that should take equally long.

    The computation-wise cut of Seq1F1B (arXiv:2406.03488), from times instead of operations: the
    slice of the positions a to b-1 costs x (b-a) + y (b^2-a^2)/2, with x and y fitted to the
    measured times, neither below 0.

    Args:
        lengths: The number of positions of each measured slice, in order.
        times: How long each took, forward and backward.
        slices: The number of slices to cut into.

    Raises:
        ConfigError: There are fewer positions than slices.
    """
    require_whole("slices", slices)
    ends = list(accumulate(lengths))
    length = ends[-1]
    if slices > length:
        raise ConfigError(
            "a slice has at least one place",
            expected=f"at most {length} slices",
            got=f"{slices} slices",
            fix="cut into fewer slices",
        )
    fitted, seen = _fit(lengths, ends, times)
    whole = fitted * length + seen * length**2 / 2
    lengths_found: list[int] = []
    for index in range(1, slices + 1):
        wanted = whole * index / slices
        if seen * length > 1e-9 * fitted:
            end = (math.sqrt(fitted**2 + 2 * seen * wanted) - fitted) / seen
        else:
            end = length * index / slices
        before = sum(lengths_found)
        lengths_found.append(max(1, min(round(end), length - (slices - index)) - before))
    return tuple(lengths_found)


def _fit(
    lengths: Sequence[int], ends: Sequence[int], times: Sequence[float]
) -> tuple[float, float]:
    """Fits x and y of :func:`balanced`: the costs of a position and of each one that it sees."""
    rounded = np.array(lengths, float)
    seen = rounded * (np.array(ends) - rounded / 2)
    measured = np.array(times)
    (x, y), *_ = np.linalg.lstsq(np.stack([rounded, seen], axis=1), measured, rcond=None)
    if y <= 0:
        return 1.0, 0.0
    return (float(x), float(y)) if x > 0 else (0.0, 1.0)
