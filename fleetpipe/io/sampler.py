"""Which samples a rank reads: a shard for each replica, the same order on all its ranks."""

from __future__ import annotations

from collections.abc import Sized

from fleetpipe._paddle import paddle
from fleetpipe.errors import StateError
from fleetpipe.job.job import current_job


class DistributedBatchSampler(paddle.io.DistributedBatchSampler):
    """Paddle's sampler, sharded by data-parallel rank and not by the rank in the world.

    All ranks of one pipeline see the same batches in the same order, and different replicas see
    different samples. With ``shuffle=True`` call ``set_epoch(epoch)`` on every rank alike.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        shuffle: bool = False,
        drop_last: bool = True,
    ) -> None:
        """Makes the sampler of this rank's replica.

        Args:
            dataset: Any dataset with a length.
            batch_size: Rows of a batch of one replica: accumulate_steps x micro_batch_size.
            shuffle: Whether to shuffle, in an order that depends on the epoch only.
            drop_last: Whether to drop an incomplete last batch; pipelines cannot take one.

        Raises:
            StateError: ``fleet.init`` was not called before.
        """
        job = current_job()
        if job is None:
            raise StateError(
                "the sampler needs to know its replica",
                fix="call fleet.init(is_collective=True, strategy=strategy) first",
            )
        super().__init__(
            dataset,
            batch_size,
            num_replicas=job.degrees.replicas,
            rank=job.replica,
            shuffle=shuffle,
            drop_last=drop_last,
        )
