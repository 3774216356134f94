"""Yields batches from the data that users pass to ``fit``, from any position of a pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any

from fleetpipe.aliases import Nest
from fleetpipe.dygraph import random_keys
from fleetpipe.errors import ConfigError, UsageError
from fleetpipe.fit.arguments import require_data
from fleetpipe.fit.feeding import Rows, rows_of
from fleetpipe.io import DataLoader
from fleetpipe.io.position import Pass
from fleetpipe.job.job import Job
from fleetpipe.mesh.axes import SEQUENCE, SHARDS
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.loading import batches_of, closing


@dataclass(frozen=True)
class BatchSource:
    """A source of batches.

    Attributes:
        loader: Yields items; a list, a generator or a loader.
        samples: Rows of the whole dataset, if read in order; None if every row of an item counts.
        together: Rows of an item in all replicas together, if ``samples`` is known.
        inputs: Number of columns of an item that are inputs.
        job: The job.
        loads: Whether items hold the samples, not their numbers alone.
        random_of_pass: The random states with which a pass over data without a position began.
    """

    loader: Iterable[Nest]
    samples: int | None
    together: int
    inputs: int
    job: Job
    loads: bool = True
    random_of_pass: Pass = field(default_factory=Pass)

    @property
    def steps(self) -> int | None:
        """Number of batches of a pass; None if the loader has no length."""
        try:
            return len(self.loader)  # type: ignore[arg-type]
        except (TypeError, ValueError):  # the latter by Paddle's, of an IterableDataset
            return None

    def batches(self, taken: int = 0) -> Iterator[Rows]:
        """Yields the batches of one pass. Collective over the job, batch by batch.

        Args:
            taken: Number of batches that an earlier attempt of the job took. A loader with a
                position is already behind them; others yield them once more, and they are dropped.

        Raises:
            ConfigError: Some ranks have more batches than others, or there is none any more.
        """
        self._begin()
        if self.job.healing is not None:
            self.job.healing.counts = True
        positioned = bool(self.state_dict())
        dropped = 0 if positioned else taken
        left = None if self.samples is None else self.samples - taken * self.together
        by_thread = getattr(self.loader, "num_workers", None) == 0
        with self.random_of_pass.again(dropped, by_thread):
            items: Iterator[Nest] = iter(
                batches_of(self.loader, self.job.timeout)
                if type(self.loader) is paddle.io.DataLoader
                else self.loader
            )
            deque(islice(items, dropped), maxlen=0)
        with closing(items):
            for number in count():
                item = next(items, None)
                rows = None if item is None else self._rows_of(item, left)
                if not (positioned and self.steps):
                    rows = self._in_step(rows, taken + number)
                if rows is None and not (number or taken):
                    raise ConfigError(
                        "the data has no batch left for this pass over it",
                        got=f"an empty {type(self.loader).__name__}",
                        cause="a generator or an iterator is used up by one pass",
                        fix="pass a Dataset, a DataLoader or a list, or what makes a new iterator "
                        "for each pass; or epochs=1",
                    )
                if rows is None:
                    return
                if left is not None:
                    left -= rows.everywhere
                yield rows

    def _rows_of(self, item: Nest, left: int | None) -> Rows:
        replicas, inputs = self.job.degrees.replicas, self.inputs if self.loads else 0
        rows = rows_of(item, inputs, self.job.replica, replicas, left)
        return rows if self.loads else rows._replace(inputs=(), labels=())

    def _begin(self) -> None:
        """Checks that all ranks have equally many batches, and synchronizes random states."""
        gather = self.job.everyone().all_gather
        lengths = self.job.exchange("beginning to read data", lambda: gather(self.steps))
        with self.job.guarded(lambda: "beginning to read data"):
            if None not in lengths and len({*lengths}) > 1:
                raise _unequal(f"batches by rank: {', '.join(map(str, lengths))}")
            if not isinstance(self.loader, DataLoader):
                if self.job.healing is not None:
                    self.job.healing.hinder("random states are shared, as a pass over data begins")
                # Samplers draw from NumPy's and Python's generators, which nobody has seeded alike.
                states = random_keys.PythonStates()
                for axes in (("pp",), SHARDS, SEQUENCE):
                    states.share(self.job.along(*axes))
                states.put_back()

    def _in_step(self, rows: Rows | None, number: int) -> Rows | None:
        """Checks that all ranks have a batch, or none; counts the rows of all replicas."""
        what, count = "asking all ranks whether the data go on", None if rows is None else rows.rows
        counts = self.job.exchange(what, lambda: self.job.everyone().all_gather(count))
        with self.job.guarded(lambda: what):
            if None in counts and {*counts} != {None}:
                ended = [rank for rank, rows_of_rank in enumerate(counts) if rows_of_rank is None]
                raise _unequal(
                    f"the data of rank {', '.join(map(str, ended))} ended after {number}"
                )
        if rows is None or self.samples is not None:
            return rows
        return rows._replace(everywhere=sum(counts) * self.job.degrees.replicas // len(counts))

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of a loader that has one; else an empty dict."""
        try:
            return self.loader.state_dict() if isinstance(self.loader, DataLoader) else {}
        except UsageError:
            return {}

    def set_state_dict(self, state: Mapping[str, Any], epoch: int) -> None:
        """Moves the loader to a saved position, or a sampler that has none to its epoch."""
        sampler: Any = getattr(self.loader, "batch_sampler", None)
        if state and isinstance(self.loader, DataLoader):
            self.loader.set_state_dict(state)
        elif hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)

    def next_epoch(self) -> None:
        """Starts the next epoch of a loader with a position; others start it by themselves."""
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
    """Returns the source of batches for users' data.

    Args:
        data: A ``Dataset``, of which each replica reads a part, an ``IterableDataset``, of which
            each replica has its own, or anything that yields batches of this replica.
        batch_size: Rows of a batch of one replica, of either kind of dataset.
        inputs: Number of columns of an item that are inputs.
        job: The job.
        shuffle: Whether the order of a ``Dataset`` changes from epoch to epoch.
        drop_last: Whether a short last batch of a dataset is left out.
        workers: Processes that load a dataset.
        loads: Whether this rank needs the samples. A rank that does not draws only their numbers
            from a ``Dataset``, to be at the same position in it; every rank reads all other data,
            because only reading them shows how many rows there are.

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
    source = BatchSource(data, samples, batch_size * replicas, inputs, job, read)
    if source.steps == 0:
        raise ConfigError(
            "the data has no batch",
            got=f"{len(data.dataset)} rows and batch_size={batch_size}"
            if isinstance(data, DataLoader)
            else f"an empty {type(data).__name__}",
            fix="give more data, a smaller batch_size, or drop_last=False",
        )
    return source


def _unequal(got: str) -> ConfigError:
    return ConfigError(
        "the data of some ranks have more batches than those of others",
        expected="as many batches on every rank: replicas step together",
        got=got,
        fix="give each replica as many rows: a Dataset, which fleetpipe deals out by itself, or an "
        "IterableDataset cut to the shortest; num_iters ends a pass before",
    )


class Numbers(paddle.io.Dataset):  # type: ignore[type-arg, unused-ignore]  # 2.6.2 takes no argument
    """A dataset whose samples are their own numbers."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return self._count
