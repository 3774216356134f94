"""Where batches come from: what users give ``fit``, read from any position of a pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from fleetpipe.aliases import Nest
from fleetpipe.errors import ConfigError, UsageError
from fleetpipe.fit.arguments import require_data
from fleetpipe.fit.feeding import Rows, rows_of
from fleetpipe.io import DataLoader
from fleetpipe.job.job import Job
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.loading import batches_of


@dataclass(frozen=True)
class BatchSource:
    """What gives batches.

    Attributes:
        loader: Gives items; a list, a generator or a loader.
        samples: Rows of the whole dataset, in its order; None where each row of an item counts.
        together: Rows that an item has in all replicas together, where ``samples`` is known.
        inputs: Number of columns of an item that are inputs.
        replica: Number of this replica.
        replicas: Number of replicas.
        loads: Whether items have the samples, or their numbers alone.
    """

    loader: Iterable[Nest]
    samples: int | None
    together: int
    inputs: int
    replica: int
    replicas: int
    loads: bool = True

    @property
    def steps(self) -> int | None:
        """Number of batches of a pass; None where the loader does not know."""
        try:
            return len(self.loader)  # type: ignore[arg-type]
        except (TypeError, ValueError):  # the latter by Paddle's, of an IterableDataset
            return None

    def batches(self, taken: int = 0) -> Iterator[Rows]:
        """Yields the batches of one pass.

        Args:
            taken: Those that were taken before, in an earlier life of the job. A loader that knows
                its position is there already; others give them once more, and they are dropped.
        """
        positioned = isinstance(self.loader, DataLoader)
        left = None if self.samples is None else self.samples - taken * self.together
        items = self.loader
        if type(items) is paddle.io.DataLoader:
            items = batches_of(items)
        for item in islice(items, 0 if positioned else taken, None):
            inputs = self.inputs if self.loads else 0
            rows = rows_of(item, inputs, self.replica, self.replicas, left)
            if not self.loads:
                rows = rows._replace(inputs=(), labels=())
            if left is not None:
                left -= rows.everywhere
            yield rows

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of a loader that has one; else nothing."""
        try:
            return self.loader.state_dict() if isinstance(self.loader, DataLoader) else {}
        except UsageError:
            return {}

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a position."""
        if state and isinstance(self.loader, DataLoader):
            self.loader.set_state_dict(state)

    def next_epoch(self) -> None:
        """Has a loader that knows its position begin an epoch; others do so by themselves."""
        if self.state_dict() and isinstance(self.loader, DataLoader):
            self.loader.set_epoch(self.loader.epoch + 1)


def source_of(
    data: Nest,
    batch_size: int,
    inputs: int,
    job: Job,
    *,
    shuffle: bool = False,
    drop_last: bool = False,
    workers: int = 0,
    loads: bool = True,
) -> BatchSource:
    """Returns where batches come from.

    Args:
        data: A ``Dataset``, of which each replica reads a part, an ``IterableDataset``, of which
            each replica has its own, or anything that yields batches of this replica.
        batch_size: Rows of a batch of one replica, of either kind of dataset.
        inputs: Number of columns of an item that are inputs.
        job: The job.
        shuffle: Whether the order of a ``Dataset`` changes from epoch to epoch.
        drop_last: Whether a short last batch of a dataset is left out.
        workers: Processes that load a dataset.
        loads: Whether this rank needs what is in the data. One that needs nothing draws the numbers
            of the samples of a ``Dataset`` alone, and is at the same place in it as the others;
            all other data are read by every rank, for nothing else says how many rows there are.

    Raises:
        ConfigError: The data is neither a ``Dataset`` nor iterable, or has no batch.
    """
    require_data(data)
    samples: int | None = None
    read = True
    replicas = job.degrees.replicas
    if isinstance(data, paddle.io.IterableDataset):
        data = DataLoader(data, batch_size=batch_size, drop_last=drop_last, num_workers=workers)
    elif isinstance(data, paddle.io.Dataset):
        samples = None if shuffle else len(data)
        read = loads
        data = DataLoader(
            data if read else Numbers(len(data)),
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            num_workers=workers if read else 0,
        )
    source = BatchSource(data, samples, batch_size * replicas, inputs, job.replica, replicas, read)
    if source.steps == 0:
        raise ConfigError(
            "the data has no batch",
            got=f"{len(data.dataset)} rows and batch_size={batch_size}"
            if isinstance(data, DataLoader)
            else f"an empty {type(data).__name__}",
            fix="give more data, a smaller batch_size, or drop_last=False",
        )
    return source


class Numbers(paddle.io.Dataset):  # type: ignore[type-arg, unused-ignore]  # 2.6.2 takes no argument
    """Stands for a dataset of which nothing but the number of samples matters."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return self._count
