"""Tracks the position of a training in its data, and yields the batches from there on.

``BatchSource`` yields the batches. ``Position`` has all state of a run except tensors: the epoch,
the batch, metrics and callbacks; a checkpoint saves it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from types import SimpleNamespace
from typing import Any

import numpy as np

from fleetpipe.aliases import Nest
from fleetpipe.checkpoint.contents.training_state import as_json
from fleetpipe.dygraph import random_keys
from fleetpipe.errors import ConfigError, UsageError
from fleetpipe.fit.arguments import require_data
from fleetpipe.fit.micro_batches import Metric, Rows, batch_from_item
from fleetpipe.fit.runner import Runner
from fleetpipe.io import DataLoader
from fleetpipe.io.position import Pass
from fleetpipe.job.job import Job
from fleetpipe.mesh.axes import SEQUENCE, SHARDS
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.loading import batches_of, closing_iterator

#: The key of the dtype in the description of an array.
_ARRAY = "dtype"

#: The attributes that are the state of Paddle's callbacks, which have no state dicts.
_STATE_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    paddle.callbacks.EarlyStopping: ("wait_epoch", "best_value", "stopped_epoch"),
    paddle.callbacks.ReduceLROnPlateau: ("cooldown_counter", "wait", "best", "epoch"),
}


@dataclass(frozen=True)
class BatchSource:
    """A source of batches.

    Attributes:
        loader: A list, a generator or a loader of items, each a batch of this replica.
        samples: The number of rows of the whole dataset, if it is read in order; None if every row
            of an item counts.
        together: The number of rows that all replicas' items of one batch have, if ``samples`` is
            known.
        inputs: The number of columns of an item that are inputs.
        job: The job.
        loads: Whether items have the samples; if not, they have only the samples' numbers.
        random_of_pass: The random states at the begin of a pass over data without a position.
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
        """The number of batches of a pass over the data; None if the loader has no length."""
        try:
            return len(self.loader)  # type: ignore[arg-type]
        except (TypeError, ValueError):  # Paddle's loader of an IterableDataset: ValueError
            return None

    def batches(self, taken: int = 0) -> Iterator[Rows]:
        """Yields the batches of one pass. Collective over the job, batch by batch.

        Args:
            taken: The number of batches that an earlier attempt of the job took. A loader with a
                position is already after them; others yield them again, and they are dropped.

        Raises:
            ConfigError: Some ranks have more batches than others, or the data have none left.
        """
        self._begin_pass()
        if self.job.healing is not None:
            self.job.healing.counts = True
        positioned = bool(self.state_dict())
        dropped = 0 if positioned else taken
        rows_left = None if self.samples is None else self.samples - taken * self.together
        by_thread = getattr(self.loader, "num_workers", None) == 0
        with self.random_of_pass.states_at_begin(dropped, by_thread):
            items: Iterator[Nest] = iter(
                batches_of(self.loader, self.job.timeout)
                if type(self.loader) is paddle.io.DataLoader
                else self.loader
            )
            deque(islice(items, dropped), maxlen=0)
        with closing_iterator(items):
            for number in count():
                item = next(items, None)
                rows = None if item is None else self._rows_of(item, rows_left)
                if not (positioned and self.steps):
                    rows = self._rows_of_all_replicas(rows, taken + number)
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
                if rows_left is not None:
                    rows_left -= rows.everywhere
                yield rows

    def _rows_of(self, item: Nest, rows_left: int | None) -> Rows:
        """Returns an item as a batch; ``rows_left`` of the dataset are left, or None if unknown."""
        replicas, inputs = self.job.degrees.replicas, self.inputs if self.loads else 0
        rows = batch_from_item(item, inputs, self.job.replica, replicas, rows_left)
        return rows if self.loads else rows._replace(inputs=(), labels=())

    def _begin_pass(self) -> None:
        """Checks that all ranks have equally many batches, and shares random states. Collective."""
        gather = self.job.everyone().all_gather
        lengths = self.job.exchange("beginning to read data", lambda: gather(self.steps))
        with self.job.guarded(lambda: "beginning to read data"):
            if None not in lengths and len({*lengths}) > 1:
                raise _unequal_lengths_error(f"batches by rank: {', '.join(map(str, lengths))}")
            if not isinstance(self.loader, DataLoader):
                if self.job.healing is not None:
                    self.job.healing.forbid_healing(
                        "random states are shared, as a pass over data begins"
                    )
                # Samplers draw from NumPy's and Python's generators, whose states differ by rank.
                states = random_keys.PythonStates()
                for axes in (("pp",), SHARDS, SEQUENCE):
                    states.share(self.job.along(*axes))
                states.put_back()

    def _rows_of_all_replicas(self, rows: Rows | None, number: int) -> Rows | None:
        """Returns a batch with the number of all replicas' rows added. Collective over the job.

        Args:
            rows: This rank's batch; None if its data have ended.
            number: The number of the batch.

        Raises:
            ConfigError: Some ranks have a batch, and others have none.
        """
        what, count = "asking all ranks whether the data go on", None if rows is None else rows.rows
        counts = self.job.exchange(what, lambda: self.job.everyone().all_gather(count))
        with self.job.guarded(lambda: what):
            if None in counts and {*counts} != {None}:
                ended = [rank for rank, count in enumerate(counts) if count is None]
                raise _unequal_lengths_error(
                    f"the data of rank {', '.join(map(str, ended))} ended after {number}"
                )
        if rows is None or self.samples is not None:
            return rows
        return rows._replace(everywhere=sum(counts) * self.job.degrees.replicas // len(counts))

    def state_dict(self) -> dict[str, Any]:
        """Returns the loader's position as values of JSON; an empty dict if it has none."""
        try:
            return self.loader.state_dict() if isinstance(self.loader, DataLoader) else {}
        except UsageError:
            return {}

    def set_state_dict(self, state: Mapping[str, Any], epoch: int) -> None:
        """Moves the loader to a saved position.

        Args:
            state: A result of :meth:`state_dict`.
            epoch: The epoch, to which the sampler of a loader without a position is set.
        """
        sampler: Any = getattr(self.loader, "batch_sampler", None)
        if state and isinstance(self.loader, DataLoader):
            self.loader.set_state_dict(state)
        elif hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)

    def next_epoch(self) -> None:
        """Moves a loader that has a position to its next epoch; does nothing for others."""
        if self.state_dict() and isinstance(self.loader, DataLoader):
            self.loader.set_epoch(self.loader.epoch + 1)


def make_batch_source(
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
    """Returns the source of batches for the data that a user passes to a ``Model``'s method.

    Args:
        data: A ``Dataset``, of which each replica reads a part, an ``IterableDataset`` of this
            replica, or anything that yields batches of this replica.
        batch_size: The rows of a batch of one replica, for both kinds of dataset.
        inputs: The number of columns of an item that are inputs.
        job: The job.
        shuffle: Whether the order of a ``Dataset`` changes from epoch to epoch.
        drop_last: Whether a short last batch of a dataset is left out.
        workers: The number of processes that load a dataset.
        loads: Whether this rank needs the samples. If not, it takes only the numbers of the samples
            from a ``Dataset``, to be at the same position; other data are read on every rank, since
            only that shows how many rows they have.

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
            data if read else SampleNumbers(len(data)),
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


def _unequal_lengths_error(got: str) -> ConfigError:
    """Returns the error of ranks with different numbers of batches; ``got`` names the numbers."""
    return ConfigError(
        "the data of some ranks have more batches than those of others",
        expected="as many batches on every rank: replicas step together",
        got=got,
        fix="give each replica as many rows: a Dataset, which fleetpipe deals out by itself, or an "
        "IterableDataset cut to the shortest; num_iters ends a pass before",
    )


class SampleNumbers(paddle.io.Dataset):  # type: ignore[type-arg, unused-ignore]  # 2.6.2 takes no argument
    """A dataset whose samples are their own numbers."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return self._count


class Position:
    """The position of ``fit`` in its data, which checkpoints save; the same on every rank.

    Attributes:
        epoch: The number of the epoch that runs or comes next, from 0.
        step: The number of batches of that epoch that were trained.
        taken: The number of batches that all epochs and evaluations took, for ``num_iters``.
        stopped: Whether a callback has ended the training.
        logs: The logs of the last batch: loss and metrics.
    """

    def __init__(self, runner: Runner, source: BatchSource, callbacks: Sequence[Any]) -> None:
        """Starts at the begin of the data.

        Args:
            runner: Counts the batches of all trainings, and has the metrics.
            source: Yields the batches.
            callbacks: The callbacks; Paddle's own and those with ``state_dict`` and
                ``set_state_dict`` resume. :meth:`callbacks_of_this_rank` has those of this rank.
        """
        self._runner = runner
        self._source = source
        self._callbacks = callbacks
        #: Saved states of callbacks by name, to be set after ``on_train_begin`` of the callbacks.
        self._saved_callback_states: dict[str, Any] = {}
        self.epoch = self.step = self.taken = 0
        self.stopped = False
        self.logs: Mapping[str, Any] = {}
        self._saved_metric_states: list[dict[str, Any]] | None = None
        for metric in runner.metrics:
            metric.reset()

    def save_metric_states(self) -> None:
        """Stores the metrics' states for the next checkpoint, before more batches change them."""
        self._saved_metric_states = self._metric_states()

    def next_epoch(self) -> None:
        """Moves the position to the begin of the next epoch."""
        self.epoch, self.step = self.epoch + 1, 0
        self._source.next_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Returns the position as values of JSON."""
        states = ((name, callback_state(one)) for name, one in self._callbacks_by_name().items())
        return {
            "epoch": self.epoch,
            "step": self.step,
            "taken": self.taken,
            "trained": self._runner.trained,
            "stopped": self.stopped,
            "loader": self._source.state_dict(),
            "metrics": self._metric_states()
            if self._saved_metric_states is None
            else self._saved_metric_states,
            "told": as_json(self.logs, "the logs"),
            "callbacks": {name: as_json(state, name) for name, state in states if state},
        }

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores epoch, batch and metrics; :meth:`restore_callbacks` must follow.

        Raises:
            CheckpointError: The position belongs to other data; no value has changed.
        """
        self._source.set_state_dict(state["loader"], state["epoch"])
        self.epoch, self.step, self.taken = state["epoch"], state["step"], state["taken"]
        self.stopped, self._runner.trained = state["stopped"], state["trained"]
        for metric, counted in zip(self._runner.metrics, state["metrics"]):
            for name, value in counted.items():
                setattr(metric, name, _from_json(value))
        self.logs = state["told"]
        self._saved_callback_states.update(state["callbacks"])

    @property
    def random_of_pass(self) -> Pass:
        """The random states at the begin of the pass over the data."""
        return getattr(self._source.loader, "random_of_pass", None) or self._source.random_of_pass

    def callbacks_of_this_rank(self) -> dict[str, Any]:
        """Returns, by name, an object to save for each callback that runs on this rank alone.

        The objects have ``state_dict`` and ``set_state_dict``; callbacks without state are left
        out.
        """
        return {
            name: SimpleNamespace(
                state_dict=partial(callback_state, one),
                set_state_dict=partial(self._saved_callback_states.__setitem__, name),
            )
            for name, one in self._callbacks_by_name(on_this_rank_alone=True).items()
            if hasattr(one, "state_dict") or _state_attributes(one)
        }

    def restore_callbacks(self) -> None:
        """Sets the saved states of callbacks; the loop calls it after ``on_train_begin``."""
        here = self._callbacks_by_name(on_this_rank_alone=True)
        for name, callback in {**self._callbacks_by_name(), **here}.items():
            if name in self._saved_callback_states:
                state = self._saved_callback_states[name]
                if hasattr(callback, "set_state_dict"):
                    callback.set_state_dict(state)
                for attribute in _state_attributes(callback):
                    setattr(callback, attribute, state[attribute])
        self._saved_callback_states.clear()

    def _metric_states(self) -> list[dict[str, Any]]:
        """Returns the states of all metrics, as values of JSON."""
        return [_metric_state(metric) for metric in self._runner.metrics]

    def _callbacks_by_name(self, on_this_rank_alone: bool = False) -> dict[str, Any]:
        """Returns the callbacks that run on all ranks, or those on this rank alone, by name.

        A name has the callback's class, the rank if it runs on one only, and a number among
        callbacks of that class.
        """
        callbacks: dict[str, Any] = {}
        counts: Counter[str] = Counter()
        for callback in self._callbacks:
            rank = getattr(callback, "on_rank", "all")
            if (rank != "all") != on_this_rank_alone:
                continue
            kind = type(callback).__name__
            if on_this_rank_alone:
                kind = f"{kind} on the {rank} rank"
            callbacks[f"{kind} {counts[kind]}"] = callback
            counts[kind] += 1
        return callbacks


def _metric_state(metric: Metric) -> dict[str, Any]:
    """Returns the state of a metric: its attributes that are numbers, arrays or lists of these."""
    numbers = (bool, int, float, np.generic, np.ndarray)
    state: dict[str, Any] = {}
    for name, value in vars(metric).items():
        items = value if isinstance(value, list) else [value]
        if all(isinstance(item, numbers) for item in items):
            state[name] = _to_json(value)
    return state


def _to_json(value: Any) -> Any:
    """Returns a number, an array or a list of these as values of JSON."""
    if isinstance(value, list):
        return [_to_json(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return {_ARRAY: str(value.dtype), "values": value.tolist()}
    return value


def _from_json(converted: Any) -> Any:
    """Returns the value that :func:`_to_json` has converted."""
    if isinstance(converted, list):
        return [_from_json(item) for item in converted]
    if isinstance(converted, dict):
        # [()] makes a number of an array without axes, and leaves other arrays.
        return np.asarray(converted["values"], converted[_ARRAY])[()]
    return converted


def callback_state(callback: Any) -> dict[str, Any]:
    """Returns the state of a callback by name; an empty dict for a callback without state."""
    if hasattr(callback, "state_dict"):
        return dict(callback.state_dict())
    return {name: getattr(callback, name) for name in _state_attributes(callback)}


def _state_attributes(callback: Any) -> tuple[str, ...]:
    """Returns the attributes that are the state of one of Paddle's callbacks; none for others."""
    return next(
        (names for kind, names in _STATE_ATTRIBUTES.items() if isinstance(callback, kind)), ()
    )
