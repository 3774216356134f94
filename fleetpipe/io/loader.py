"""``DataLoader``: Paddle's loader, which can save how many batches the training has taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

from fleetpipe.errors import UsageError, require_whole
from fleetpipe.io.position import (
    IterableWrapper,
    Pass,
    ResumableSampler,
    SampledBatches,
    SequentialBatches,
)
from fleetpipe.io.sample_streams import KeyedCollate, KeyedDataset
from fleetpipe.io.sampler import DistributedBatchSampler, replicas_and_replica
from fleetpipe.job.job import current_job
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.loading import batches_of
from fleetpipe.representation import shows


@shows("dataset", "batch_sampler")
class DataLoader(paddle.io.DataLoader):
    """Paddle's loader, with a state that says which samples the training has taken.

    Batches that workers and threads have loaded ahead do not count. A run that restores the state
    takes the samples that the uninterrupted run would have, in the same order, with any number of
    workers and, over a :class:`~fleetpipe.io.DistributedBatchSampler`, of replicas. Each iteration
    is one epoch; the first one after a restore reads the rest of its epoch, which may be empty.

    Pass it to ``CheckpointManager.save(.., data=loader)``. Every rank that reads data must create
    it with the same arguments and take its batches in step.
    """

    def __init__(
        self,
        dataset: Any,
        feed_list: Any = None,
        places: Any = None,
        return_list: bool = True,
        batch_sampler: Any = None,
        batch_size: int | None = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        collate_fn: Callable[[Any], Any] | None = None,
        num_workers: int = 0,
        *,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """Creates a loader with Paddle's arguments.

        Args:
            dataset: An object with ``__getitem__`` and a length; or an iterable with the samples of
                this replica only. A list of batches needs ``batch_size=None``.
            feed_list: As in Paddle.
            places: As in Paddle.
            return_list: As in Paddle.
            batch_sampler: For a dataset with a length. By default a
                :class:`~fleetpipe.io.DistributedBatchSampler` made of the following arguments,
                which gives each replica of the job its own samples. The position of a sampler
                without ``state_dict`` and ``set_state_dict`` cannot be saved.
            batch_size: Rows of a batch of one replica; None if the dataset's items are batches.
            shuffle: Whether the default batch sampler shuffles.
            drop_last: Whether the default batch sampler drops an incomplete last batch.
            collate_fn: As in Paddle.
            num_workers: As in Paddle. An iterable that is not a ``paddle.io.IterableDataset`` needs
                0.
            seed: The seed of the order, and of the :func:`~fleetpipe.io.sample_generator` of each
                sample.
            options: Other arguments of Paddle's loader, by name: ``use_buffer_reader``,
                ``prefetch_factor``, ``use_shared_memory``, ``timeout``, ``worker_init_fn``,
                ``persistent_workers``.

        Raises:
            ConfigError: ``seed`` or ``batch_size`` is not a whole number.
            StateError: ``fleet.init`` was not called before, in a process that is one of several.
            UsageError: The dataset has another type, or is an iterator to be read by workers.
        """
        require_whole("seed", seed, 0)
        has_indices = (
            not isinstance(dataset, paddle.io.IterableDataset)
            and hasattr(dataset, "__getitem__")
            and isinstance(dataset, Sized)
        )
        items_are_batches = has_indices and batch_sampler is None and batch_size is None
        options.update(feed_list=feed_list, places=places, return_list=return_list)
        options.update(num_workers=num_workers)
        if has_indices and batch_sampler is None:
            rows = 1 if batch_size is None else batch_size
            batch_sampler = DistributedBatchSampler(
                dataset, rows, shuffle=shuffle, drop_last=drop_last, seed=seed
            )
            batching: dict[str, Any] = {}
        else:
            batching = {"batch_size": batch_size, "shuffle": shuffle, "drop_last": drop_last}
        paddle_dataset = dataset if has_indices else _as_iterable_dataset(dataset, num_workers)
        options.update(batch_sampler=batch_sampler, collate_fn=collate_fn)
        super().__init__(paddle_dataset, **options, **batching)
        self._loader: paddle.io.DataLoader = self
        self._position: SampledBatches | SequentialBatches | None = None
        if not has_indices:
            replicas, _ = replicas_and_replica()
            facts = {"batch_size": batch_size or 1, "workers": num_workers, "replicas": replicas}
            self._position = SequentialBatches(dataset, facts)
        elif isinstance(batch_sampler, ResumableSampler):
            # An inner loader gets keys in the place of indices; the user's attributes show none.
            sampled = SampledBatches(batch_sampler, seed)
            collate = KeyedCollate(collate_fn, items_are_batches)
            options.update(batch_sampler=sampled, collate_fn=collate)
            keyed: Any = KeyedDataset(dataset)
            self._loader = paddle.io.DataLoader(keyed, **options)
            self._position = sampled

    def __iter__(self) -> Any:
        """Yields the batches of the next epoch, or the rest of a restored epoch.

        A batch counts as taken when it is yielded: save after the step that trained on it. An error
        of the dataset is raised here, in place of the batch that failed.
        """
        if self._position is None:
            return self._batches()
        return self._position.read(self._batches)

    def _batches(self) -> Iterator[Any]:
        """Yields the batches of a pass over the data, under the job's time limit."""
        job = current_job()
        return batches_of(self._loader, None if job is None else job.timeout)

    @property
    def epoch(self) -> int:
        """The epoch that is being read, or comes next."""
        return self._resumable().epoch

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch that the next iteration reads, from its begin or a restored position.

        Args:
            epoch: The number of the epoch, from 0.

        Raises:
            ConfigError: ``epoch`` is no whole number from 0.
        """
        self._resumable().set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the training in its data, the same on all ranks, as JSON values.

        Raises:
            UsageError: The batch sampler cannot save its position.
        """
        return self._resumable().state_dict()

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration continue at a saved position.

        Args:
            state: A result of :meth:`state_dict`. For an iterable it must have been saved with the
                same batch size, workers and replicas; the batches before the position are loaded
                again and dropped.

        Raises:
            CheckpointError: ``state`` is not the state of a loader, or was saved for other data;
                nothing has changed.
            UsageError: The batch sampler cannot restore a position.
        """
        self._resumable().set_state_dict(state)

    @property
    def random_of_pass(self) -> Pass | None:
        """The random states at the begin of a pass over an iterable; None for indexed data."""
        return getattr(self._position, "random_of_pass", None)

    def _resumable(self) -> SampledBatches | SequentialBatches:
        """Returns the position of the loader; raises a UsageError if it cannot be saved."""
        if self._position is None:
            raise UsageError(
                f"a {type(self.batch_sampler).__name__} has no position that could be saved",
                expected="a batch sampler with epoch, set_epoch, state_dict and set_state_dict",
                fix="use fleetpipe.io.DistributedBatchSampler, or leave batch_sampler out",
            )
        return self._position


def _as_iterable_dataset(dataset: Any, workers: int) -> paddle.io.IterableDataset[Any]:
    """Returns an iterable as one of Paddle's datasets.

    Raises:
        UsageError: The dataset is no iterable, or each of several workers would read all of it.
    """
    if isinstance(dataset, paddle.io.IterableDataset):
        return dataset
    if not isinstance(dataset, Iterable):
        raise UsageError(
            "the dataset can be read neither by numbers nor in turn",
            expected="__getitem__ and __len__, or __iter__",
            got=type(dataset).__name__,
            fix="give a paddle.io.Dataset, a list or another iterable",
        )
    if workers:
        raise UsageError(
            f"each of {workers} workers would read all of a {type(dataset).__name__}",
            fix="leave num_workers 0, or make it a paddle.io.IterableDataset that asks "
            "paddle.io.get_worker_info() for its part",
        )
    return IterableWrapper(dataset)
