"""Computes how much each slice of a sequence counts in the loss of its micro-batch.

A loss is a mean over positions, and the loss of a micro-batch must be the mean over all its
positions. So a slice counts by the number of positions that its own mean is over: all of them, or
those that the loss function says that it counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from fleetpipe.aliases import Nest
from fleetpipe.contrib.slices.lengths import Bounds, Slicing, bounds_of, part_of
from fleetpipe.dygraph.batch.losses import Criterion
from fleetpipe.dygraph.batch.micro_batches import MicroBatches
from fleetpipe.dygraph.batch.weights import places_in


def slice_shares(
    functions: Sequence[Criterion], batches: MicroBatches, slicing: Slicing
) -> list[list[Fraction]]:
    """Returns for each loss function the share of each slice in the loss of its micro-batch.

    If no position of a micro-batch is counted, its slices count by their lengths.

    Args:
        functions: The loss functions.
        batches: The micro-batches before the cut, as far as this rank has them.
        slicing: How they are cut.

    Raises:
        ConfigError: Sequences cannot be cut, or what a function counts cannot be read.
    """
    if not batches.labels:
        # A rank that does not have the last stage: nobody asks it.
        return []
    cuts = [bounds_of(label, slicing, "a micro-batch") for label in batches.labels]
    return [
        [
            share
            for label, cut in zip(batches.labels, cuts)
            for share in _shares(function, label, cut)
        ]
        for function in functions
    ]


def _shares(function: Any, label: Nest, cut: Bounds) -> list[Fraction]:
    """Returns the shares of the slices of one micro-batch."""
    counts = [places_in(function, part_of(label, *slice_)).mean_over for slice_ in cut]
    if None in counts:  # a sum
        return [Fraction(1)] * len(cut)
    total = sum(counts)
    if not total:
        return [Fraction(end - begin, cut[-1][1]) for begin, end in cut]
    return [count / total for count in counts]
