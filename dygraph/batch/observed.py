"""The description of a batch that its observers get."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from fleetpipe.aliases import Optimizer, Scaler
from fleetpipe.dygraph.batch.micro_batches import MicroBatches
from fleetpipe.dygraph.random_keys import Keys


class ObservedBatch(NamedTuple):
    """A batch that is about to be trained.

    Attributes:
        data: The micro-batches that the caller gave this rank.
        keys: The seeds for random numbers in layers; None if the user's seeds apply.
        weights: The weight of each micro-batch; None if the caller gives none.
        loss_fn_idx: The number of the loss function that backward starts from.
        optimizer: The optimizer that steps after the batch; None if the caller steps.
        scaler: The scaler of the loss; None for none.
    """

    data: MicroBatches
    keys: Keys | None
    weights: Sequence[Fraction] | None
    loss_fn_idx: int
    optimizer: Optimizer
    scaler: Scaler
