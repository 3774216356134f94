"""A data loader from which a static pipeline takes accumulate_steps items in each run.

Paddle's ``DataLoader.from_generator(iterable=False)`` has the same calls; it is gone from 3.3.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from fleetpipe.aliases import Program, Variable
from fleetpipe.errors import ConfigError, StateError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.static import numpy_dtype_name
from fleetpipe.representation import shows
from fleetpipe.static.graph import Item
from fleetpipe.static.run.feeding import merge

#: A tuple with a part per feed: numbers, or arrays.
Sample = Sequence[Any]
Samples = Callable[[], Iterable[Any]]
_loaders: weakref.WeakKeyDictionary[Program, list[DataLoader]] = weakref.WeakKeyDictionary()


@shows(feeds="_names")
class DataLoader:
    """Feeds a program by itself: between ``start`` and ``reset``, ``run`` needs no ``feed``.

    Each item of the generator is a micro-batch. At the end of the data, on every rank at the same
    step, ``exe.run`` raises ``paddle.base.core.EOFException``; an incomplete last group of
    micro-batches is dropped. Items are read as they are needed.
    """

    def __init__(self, feed_list: Sequence[Variable]) -> None:
        """Creates a loader for the default main program.

        Args:
            feed_list: Results of ``paddle.static.data``, in the order of a sample's parts.
        """
        self._names = [one.name for one in feed_list]
        self._shapes = [tuple(one.shape) for one in feed_list]
        self._dtypes = [numpy_dtype_name(one) for one in feed_list]
        self._source: Callable[[], Iterator[Item]] | None = None
        self._items: Iterator[Item] | None = None
        _loaders.setdefault(paddle.static.default_main_program(), []).append(self)

    @staticmethod
    def from_generator(
        feed_list: Sequence[Variable],
        capacity: int | None = None,
        use_double_buffer: bool = True,
        iterable: bool = False,
    ) -> DataLoader:
        """Creates a loader with Paddle's arguments.

        Args:
            feed_list: As for the class.
            capacity: Ignored.
            use_double_buffer: Ignored.
            iterable: Must be False; otherwise pass an iterator as ``feed``.

        Raises:
            ConfigError: ``iterable`` is True.
        """
        if iterable:
            raise ConfigError(
                "this loader feeds its program by itself",
                got="iterable=True",
                fix="iterable=False; or give exe.run an iterator over micro-batches: "
                "items = iter(loader); exe.run(main, feed=items, ..)",
            )
        return DataLoader(feed_list)

    def set_sample_generator(
        self, reader: Samples, batch_size: int, drop_last: bool = True, places: object = None
    ) -> DataLoader:
        """Takes single samples; each ``batch_size`` of them form a micro-batch.

        Args:
            reader: Called without arguments; yields samples, each a tuple with a part per feed.
            batch_size: Rows of a micro-batch.
            drop_last: Must be True: an incomplete last micro-batch is dropped.
            places: Ignored.

        Raises:
            ConfigError: ``drop_last`` is False.
        """
        if not drop_last:
            raise ConfigError(
                "a pipeline cannot take an incomplete micro-batch",
                got=f"drop_last={drop_last!r}",
                fix="pass drop_last=True",
            )

        def groups() -> Iterator[Sequence[Sample]]:
            waiting: list[Sample] = []
            for sample in reader():
                waiting.append(sample)
                if len(waiting) == batch_size:
                    yield waiting
                    waiting = []

        return self.set_sample_list_generator(groups)

    def set_sample_list_generator(self, reader: Samples, places: object = None) -> DataLoader:
        """Takes lists of samples, each list a micro-batch.

        Args:
            reader: Called without arguments; yields lists of samples.
            places: Ignored.
        """
        return self.set_batch_generator(
            lambda: (
                [self._stack(index, part) for index, part in enumerate(zip(*samples))]
                for samples in reader()
            )
        )

    def set_batch_generator(self, reader: Samples, places: object = None) -> DataLoader:
        """Takes micro-batches, each a tuple with an array per feed.

        Args:
            reader: Called without arguments; yields micro-batches.
            places: Ignored.
        """
        self._source = lambda: (dict(zip(self._names, batch)) for batch in reader())
        return self

    def start(self) -> None:
        """Starts to read the generator for an epoch.

        Raises:
            StateError: There is no generator, or an epoch is running.
        """
        if self._source is None:
            raise StateError("the loader has no generator", fix="loader.set_batch_generator(..)")
        if self._items is not None:
            raise StateError("the loader was started before", fix="loader.reset() after an epoch")
        self._items = self._source()

    def reset(self) -> None:
        """Stops reading, so that the next :meth:`start` begins a new epoch."""
        self._items = None

    def _stack(self, index: int, parts: Sample) -> np.ndarray:
        array = np.stack([np.asarray(part) for part in parts]).astype(self._dtypes[index])
        shape = self._shapes[index][1:]
        return array if -1 in shape else array.reshape(len(parts), *shape)


def items_for(program: Program, feed: object) -> Iterator[Item] | None:
    """Returns the iterator of a run's micro-batches; None if ``feed`` has them all.

    Args:
        program: The program that is run.
        feed: The ``feed`` of ``run``: an iterator over micro-batches, or nothing while a loader of
            the program is started.

    Raises:
        StateError: Nothing is fed, and no loader of the program is started.
    """
    if isinstance(feed, Iterator):
        return feed
    if feed:
        return None
    loaders = _loaders.get(program, ())
    started = [one._items for one in loaders if one._items is not None]
    if loaders and not started:
        raise StateError(
            "the program reads from a loader that was not started",
            fix="loader.start() before each epoch, loader.reset() after it; or feed by hand",
        )
    if len(started) > 1:
        return (merge(parts) for parts in zip(*started))
    return started[0] if started else None
