"""``get_dataloader``: Paddle's loader, with a shard of the samples for each replica."""

from __future__ import annotations

from typing import Any

from fleetpipe._paddle import paddle
from fleetpipe.io import DistributedBatchSampler


def get_dataloader(
    dataset: Any,
    shuffle: bool = False,
    drop_last: bool = True,
    num_workers: int = 0,
    batch_size: int = 1,
) -> Any:
    """Returns a ``paddle.io.DataLoader``; all ranks of a pipeline read the same batches.

    Args:
        dataset: Any dataset with a length.
        shuffle: Whether to shuffle, in an order that depends on the epoch only.
        drop_last: Whether to drop an incomplete last batch.
        num_workers: Processes that read.
        batch_size: Rows of a batch of one replica.

    Raises:
        StateError: ``launch_from_torch`` was not called before.
    """
    sampler = DistributedBatchSampler(dataset, batch_size, shuffle=shuffle, drop_last=drop_last)
    return paddle.io.DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers)
