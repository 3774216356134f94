"""What the observers of a batch are told of it."""

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
        data: The micro-batches that this rank was given.
        keys: The seeds of what its layers draw; None where they draw as the user seeds.
        weights: The weight of each micro-batch, where the caller gives them.
        loss_fn_idx: The loss function that backward starts from.
        optimizer: What steps; None where the caller steps it.
        scaler: What scales the loss; None for none.
    """

    data: MicroBatches
    keys: Keys | None
    weights: Sequence[Fraction] | None
    loss_fn_idx: int
    optimizer: Optimizer
    scaler: Scaler
