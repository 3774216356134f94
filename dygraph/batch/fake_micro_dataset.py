"""``FakeMicroDataset``: an iterator over the micro-batches of ``[inputs, labels]``, as in Fleet."""

from __future__ import annotations

from fleetpipe.aliases import Nest
from fleetpipe.dygraph.batch.micro_batches import MicroBatchCut, split


class FakeMicroDataset:
    """Yields ``(inputs, labels)`` of each micro-batch; labels of one dimension are fine."""

    def __init__(
        self,
        data: Nest,
        is_first_stage: bool,
        is_last_stage: bool,
        acc_steps: int,
        micro_batch_size: int,
    ) -> None:
        """Cuts a batch.

        Args:
            data: ``[inputs, labels]`` in any form that ``train_batch`` takes.
            is_first_stage: Whether to yield the inputs; else None stands in their place.
            is_last_stage: Whether to yield the labels.
            acc_steps: Number of micro-batches.
            micro_batch_size: Rows of each.

        Raises:
            ConfigError: The number of rows does not fit.
            BoundaryError: A value is not made of Tensors.
        """
        inputs, labels = split(data, MicroBatchCut(acc_steps, micro_batch_size))
        nothing = [None] * acc_steps
        self._items = iter(
            list(
                zip(
                    inputs if is_first_stage and inputs else nothing,
                    labels if is_last_stage and labels else nothing,
                )
            )
        )

    def __iter__(self) -> FakeMicroDataset:
        """Returns itself."""
        return self

    def __next__(self) -> tuple[Nest, Nest]:
        """Returns the next ``(inputs, labels)``."""
        return next(self._items)
