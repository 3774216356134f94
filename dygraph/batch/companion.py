"""What is trained beside a pipeline's batches: it sees each of them before parameters change."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Callable, NamedTuple, Protocol

from fleetpipe.aliases import Nest, Optimizer, Scaler
from fleetpipe.dygraph.batch.micro_batches import MicroBatches
from fleetpipe.dygraph.random_keys import Keys


class BatchBeside(NamedTuple):
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


class Companion(Protocol):
    """Trains beside a pipeline. Every call is collective over the job."""

    def begin(self, batch: BatchBeside) -> None:
        """Called before a batch runs."""

    def reduced(self, loss: Nest) -> None:
        """Called with the loss, when the gradients are complete; what it raises ends the batch."""

    def step(self, step: Callable[[], None]) -> None:
        """Called in the place of the optimizer's step, which ``step()`` does."""
