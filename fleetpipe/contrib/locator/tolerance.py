"""Measures the difference of two tensors, and how much of it rounding alone may cause.

A difference counts if it is larger than the effect of a change in the last place: the twin runs a
second time with each number of its weights, data and gradients changed by at most one unit, and the
difference at a place is the effect of rounding there, for any operation.
"""

from __future__ import annotations

import numpy as np

from fleetpipe.compare.differences import gaps_of
from fleetpipe.compare.differences import numbers_of as numbers_of
from fleetpipe.compare.rounding import MARGIN
from fleetpipe.contrib.locator.record import Meaning, Record

#: One unit in the last place of 1, by the size of the number.
_UNITS = {2: 2.0**-10, 4: 2.0**-23, 8: 2.0**-52, 16: 2.0**-52}


def gap(ours: np.ndarray, expected: np.ndarray, scale: float | None = None) -> float:
    """Returns the largest difference over the largest expected number; 0 for equal bits.

    Args:
        ours: A tensor.
        expected: The expected tensor.
        scale: The largest number of the whole tensors of which these are parts.
    """
    if ours.shape != expected.shape:
        return float("inf")
    if ours.size == 0 or ours.tobytes() == expected.tobytes():
        return 0.0
    worst = float(gaps_of(ours, expected).max())
    size = largest(expected) if scale is None else scale
    return worst / size if size else (0.0 if worst == 0 else float("inf"))


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two tensors have the same bits."""
    return one.shape == other.shape and one.tobytes() == other.tobytes()


def largest(tensor: np.ndarray) -> float:
    """Returns the largest finite absolute value."""
    values = np.abs(tensor.astype("float64"))
    return float(values[np.isfinite(values)].max(initial=0.0))


class Tolerances:
    """The differences that rounding may cause at each place, as measured."""

    def __init__(self, twin: Record, perturbed: Record | None) -> None:
        """Compares a twin with its perturbed run; None: bits must be equal."""
        #: By place, the steps and what was measured in each.
        self._measured: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
        self._exact = perturbed is None
        if perturbed is None:
            return
        (rank,), (other,) = twin.ranks, perturbed.ranks
        for place, tensor in rank.tensors.items():
            moved = other.tensors.get(place)
            if moved is not None and tensor.dtype.kind == "f":
                key = _key(place)
                measured = place.step, min(gap(moved, tensor), 1.0)
                self._measured.setdefault(key, []).append(measured)

    def at(self, place: Meaning, dtype: np.dtype[np.generic]) -> float:
        """Returns the largest allowed relative difference at a place."""
        if self._exact or dtype.kind != "f":
            return 0.0
        unit = _UNITS[dtype.itemsize]
        # What comes after a bug may be anything: a step is measured by those up to it.
        samples = self._measured.get(_key(place), [])
        return MARGIN * max([unit, *(size for step, size in samples if step <= place.step)])


def _key(place: Meaning) -> tuple[str, str, str]:
    # One place for all micro-batches: a sample of one number says little.
    return place.phase, place.name, place.part
