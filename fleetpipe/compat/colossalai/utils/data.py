"""``get_dataloader``: a loader with a shard of the samples for each replica."""

from __future__ import annotations

from typing import Any

from fleetpipe.io import DataLoader


def get_dataloader(
    dataset: Any,
    shuffle: bool = False,
    drop_last: bool = True,
    num_workers: int = 0,
    batch_size: int = 1,
    seed: int = 1024,
    add_sampler: bool = True,
    pin_memory: bool = False,
    **options: Any,
) -> DataLoader:
    """Returns a :class:`fleetpipe.io.DataLoader`; all ranks of a pipeline read the same batches.

    Args:
        dataset: Any dataset with a length.
        shuffle: Whether to shuffle, in an order that depends on seed and epoch only.
        drop_last: Whether to drop an incomplete last batch.
        num_workers: Processes that read.
        batch_size: Rows of a batch of one replica.
        seed: Of the order.
        add_sampler: Accepted without effect: each replica has its own samples.
        pin_memory: Accepted without effect.
        options: Others of Paddle's loader, by name.

    Raises:
        StateError: ``launch_from_torch`` was not called before, in one of several processes.
    """
    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=shuffle,
        drop_last=drop_last,
        num_workers=num_workers,
        seed=seed,
        **options,
    )
