"""Computes how much each slice of a sequence counts in the loss of its micro-batch.

A loss is a mean over places, and the loss of a micro-batch must be the mean over all its places. So
a slice counts by the number of places that its own mean is over: all of them, or those that the
loss function says that it counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from fleetpipe.aliases import Nest
from fleetpipe.contrib.slices.lengths import Bounds, Slicing, bounds_of, part_of
from fleetpipe.dygraph.batch.counted_places import count_places, is_sum
from fleetpipe.dygraph.batch.losses import Criterion
from fleetpipe.dygraph.batch.micro_batches import MicroBatches


def slice_shares(
    functions: Sequence[Criterion], batches: MicroBatches, slicing: Slicing
) -> list[list[Fraction]]:
    """Returns for each loss function the share of each slice in the loss of its micro-batch.

    ``counted_places`` explains how a function says what it counts. If no place of a micro-batch is
    counted, its slices count by their lengths.

    Args:
        functions: The loss functions.
        batches: The micro-batches before the cut, as far as this rank has them.
        slicing: How they are cut.

    Raises:
        ConfigError: Sequences cannot be cut, or labels are below 0 and a function does not say
            whether it counts them.
    """
    parts = next((part for part in (batches.labels, batches.inputs) if part), None)
    if parts is None:
        # A rank that has neither the first stage nor the last: nobody asks it.
        return []
    cuts = [bounds_of(value, slicing, "a micro-batch") for value in parts]
    labels = batches.labels or [None] * len(cuts)
    return [
        [share for label, cut in zip(labels, cuts) for share in _shares(function, label, cut)]
        for function in functions
    ]


def _shares(function: Any, label: Nest, cut: Bounds) -> list[Fraction]:
    """Returns the shares of the slices of one micro-batch."""
    length = cut[-1][1]
    by_length = [Fraction(end - begin, length) for begin, end in cut]
    if is_sum(function):
        return [Fraction(1)] * len(cut)
    counts = [count_places(function, part_of(label, *slice_)) for slice_ in cut]
    numbers = [count for count in counts if count is not None]
    total = sum(numbers)
    if len(numbers) < len(counts) or not total:
        return by_length
    return [count / total for count in numbers]
