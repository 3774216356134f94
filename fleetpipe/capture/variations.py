"""Other numbers for an example's, which every model takes that takes the example.

Numbers that a model cannot take may end the process, deep within an operation: a box whose end is
before its beginning, an offset behind the last row. So this table has what is safe, and why:

==============================  ============================  ===============================
numbers                         variations                    what stays as it is
==============================  ============================  ===============================
floats                          rows in another order, mixed,  signs, and the order of a row's
                                or all nearer to zero         numbers, as in boxes and shares
floats of both signs            zeros, too                    their range
whole numbers and bools         rows in another order         each row, with its other inputs
such that ascend or descend     none                          offsets, numbers of segments
such without the batch's rows   none                          edges, sizes
==============================  ============================  ===============================
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.capture.tracing.capturing import Capturing
from fleetpipe.capture.tracing.signature import with_numbers
from fleetpipe.dygraph.nest import tensors_of


class Variation(NamedTuple):
    """A change of an example's numbers.

    Attributes:
        shift: By how many rows each row moves; None puts the first in the place of all.
        mixed: The share of the row before in each row of floats.
        scale: The factor of floats, at most 1.
    """

    shift: int | None
    mixed: float = 0.0
    scale: float = 1.0


ROLLED, MIXED = Variation(1, scale=0.75), Variation(2, mixed=0.4, scale=0.5)
#: All variations of a proof, from the example itself on.
ALL = (
    *(Variation(0), ROLLED, Variation(1, mixed=0.7), MIXED),
    *(Variation(0, scale=0.0), Variation(None)),
)


def vary_example(capturing: Capturing, variation: Variation) -> Nest:
    """Returns the example with varied numbers where the forward does not read them."""
    rows = rows_of(capturing.example)
    return capturing.vary(
        lambda tensor: with_numbers(tensor, lambda numbers: vary_numbers(numbers, variation, rows))
    )


def rows_of(example: Nest) -> int:
    """Returns the number of rows of the batch: that of the first tensor that has any."""
    return next((tensor.shape[0] for tensor in tensors_of(example) if tensor.ndim), 0)


def with_another_row(capturing: Capturing) -> Nest | None:
    """Returns the example with its first row once more at the end of each tensor.

    None if not all have as many rows: what belongs to a row is not known then.
    """
    shapes = [tensor.shape for tensor in tensors_of(capturing.example)]
    if len({shape[0] for shape in shapes if shape}) != 1 or not rows_of(capturing.example):
        return None

    def longer(tensor: Tensor) -> Tensor:
        if not tensor.ndim:
            return tensor
        return with_numbers(tensor, lambda numbers: np.concatenate([numbers, numbers[:1]]))

    return capturing.vary(longer)


def vary_numbers(numbers: Any, variation: Variation, rows: int) -> Any:
    """Returns varied numbers of a NumPy array, in a batch of so many rows."""
    has_rows = numbers.ndim > 0 and len(numbers) == rows > 0
    if numbers.dtype.kind in "iub":
        return _move_rows(numbers, variation) if has_rows and not _is_monotone(numbers) else numbers
    if has_rows:
        numbers = _move_rows(numbers, variation)
        if variation.mixed:
            before = np.roll(numbers, 1, 0)
            numbers = (1 - variation.mixed) * numbers + variation.mixed * before
    if variation.scale:
        return numbers * variation.scale
    has_both_signs = numbers.dtype.kind == "f" and (numbers < 0).any() and (numbers > 0).any()
    return np.zeros_like(numbers) if has_both_signs else numbers


def _move_rows(rows: Any, variation: Variation) -> Any:
    if variation.shift is None:
        return np.broadcast_to(rows[:1], rows.shape).copy()
    return np.roll(rows, variation.shift, 0)


def _is_monotone(numbers: Any) -> bool:
    """Whether numbers of one axis ascend or descend."""
    steps = np.diff(numbers.astype("int64")) if numbers.ndim == 1 else np.array([-1, 1])
    return bool((steps >= 0).all() or (steps <= 0).all())
