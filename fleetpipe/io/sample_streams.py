"""Seeds the random numbers for loading a sample by the seed, the epoch and the sample's index.

So an augmentation draws the same numbers in any run, whichever worker loads the sample. In a worker
the streams of ``random``, NumPy and Paddle are seeded before each sample, which takes about 30 us.
In the training process these streams are the training's and stay unchanged;
:func:`sample_generator` is repeatable in both.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from fleetpipe.errors import StateError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.loading import default_collate_fn, default_convert_fn

#: Appended to the key of a batch's first sample, for the random numbers of joining the batch.
_BATCH_MARK = 1

#: Its ``key`` is that of the sample or batch that this thread is loading; None between them.
_current = threading.local()


class Key(NamedTuple):
    """The key of a sample, on which its random numbers depend.

    Attributes:
        seed: The seed of the loader.
        epoch: The number of the epoch.
        number: The index of the sample in the dataset.
    """

    seed: int
    epoch: int
    number: int


class Loaded(NamedTuple):
    """A loaded sample with its key, before samples are joined to a batch."""

    key: Key
    sample: Any


class KeyedDataset:
    """Loads the samples of a dataset by their keys, each with random numbers of its own."""

    def __init__(self, dataset: Any) -> None:
        self._dataset: Any = dataset

    def __getitem__(self, key: Key) -> Loaded:
        """Loads the sample of a key, with random streams that the key seeds."""
        with _sample_streams(*key):
            return Loaded(key, self._dataset[key.number])

    def __getattr__(self, name: str) -> Any:
        """Forwards attributes to the dataset, for a ``worker_init_fn`` that uses them."""
        return getattr(self._dataset, name)


class KeyedCollate:
    """Joins samples to a batch, with random numbers keyed by the batch's first sample."""

    def __init__(self, collate: Callable[[Any], Any] | None, items_are_batches: bool) -> None:
        """Wraps the user's function.

        Args:
            collate: Called with a list of samples; None for Paddle's own.
            items_are_batches: Whether a sample is a batch already; then ``collate`` gets the sample
                itself, not a list.
        """
        paddles = default_convert_fn if items_are_batches else default_collate_fn
        self._collate: Callable[[Any], Any] = collate or paddles
        self._items_are_batches = items_are_batches

    def __call__(self, loaded: Sequence[Loaded]) -> Any:
        """Joins loaded samples to a batch."""
        first = loaded[0]
        with _sample_streams(*first.key, _BATCH_MARK):
            if self._items_are_batches:
                return self._collate(first.sample)
            return self._collate([item.sample for item in loaded])


def sample_generator() -> np.random.Generator:
    """Returns a random generator for the sample being loaded, or the batch being joined.

    Call it in a dataset's ``__getitem__`` or a ``collate_fn`` of a
    :class:`~fleetpipe.io.DataLoader`. The numbers depend on the loader's seed, the epoch and the
    sample's index only; another call for the same sample starts them again.

    Raises:
        StateError: No sample is being loaded in this thread.
    """
    key = getattr(_current, "key", None)
    if key is None:
        raise StateError(
            "no sample is being loaded here",
            fix="call sample_generator() within __getitem__ or collate_fn of what a "
            "fleetpipe.io.DataLoader with a resumable batch sampler loads",
        )
    return np.random.default_rng(key)


@contextmanager
def _sample_streams(*key: int) -> Iterator[None]:
    """In this context, random numbers of samples in this thread depend on ``key``.

    In a worker process, ``key`` also seeds the streams of ``random``, NumPy and Paddle.
    """
    _current.key = key
    try:
        if paddle.io.get_worker_info() is not None:
            first, second, third = np.random.SeedSequence(key).generate_state(3).tolist()
            random.seed(first)
            np.random.seed(second)
            paddle.seed(third)
        yield
    finally:
        _current.key = None
