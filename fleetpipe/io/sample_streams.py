"""Random numbers for loading a sample, which depend only on the seed, the epoch and the sample.

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
_JOINING = 1

_loading = threading.local()


class Key(NamedTuple):
    """The index of a sample with the seed and epoch that its random numbers depend on."""

    seed: int
    epoch: int
    number: int


class Loaded(NamedTuple):
    """A loaded sample with its key, before samples are joined to a batch."""

    key: Key
    sample: Any


class KeyedDataset:
    """Loads the samples of a dataset, each with random numbers of its own."""

    def __init__(self, dataset: Any) -> None:
        self._dataset: Any = dataset

    def __getitem__(self, key: Key) -> Loaded:
        with _streams(*key):
            return Loaded(key, self._dataset[key.number])

    def __getattr__(self, name: str) -> Any:
        """Forwards attributes to the dataset, for a ``worker_init_fn`` that uses them."""
        return getattr(self._dataset, name)


class KeyedCollate:
    """Joins samples to a batch, with random numbers keyed by the batch's first sample."""

    def __init__(self, collate: Callable[[Any], Any] | None, alone: bool) -> None:
        """Wraps the user's function.

        Args:
            collate: Called with a list of samples; None for Paddle's own.
            alone: Whether a sample is a batch already and is passed to ``collate`` by itself.
        """
        self._collate: Callable[[Any], Any] = collate or (
            default_convert_fn if alone else default_collate_fn
        )
        self._alone = alone

    def __call__(self, loaded: Sequence[Loaded]) -> Any:
        """Joins loaded samples to a batch."""
        with _streams(*loaded[0].key, _JOINING):
            if self._alone:
                return self._collate(loaded[0].sample)
            return self._collate([one.sample for one in loaded])


def sample_generator() -> np.random.Generator:
    """Returns a random generator for the sample being loaded, or the batch being joined.

    Call it in a dataset's ``__getitem__`` or a ``collate_fn`` of a
    :class:`~fleetpipe.io.DataLoader`. The numbers depend on the loader's seed, the epoch and the
    sample's index only; another call for the same sample starts them again.

    Raises:
        StateError: No sample is being loaded in this thread.
    """
    key = getattr(_loading, "key", None)
    if key is None:
        raise StateError(
            "no sample is being loaded here",
            fix="call sample_generator() within __getitem__ or collate_fn of what a "
            "fleetpipe.io.DataLoader with a resumable batch sampler loads",
        )
    return np.random.default_rng(key)


@contextmanager
def _streams(*key: int) -> Iterator[None]:
    _loading.key = key
    try:
        if paddle.io.get_worker_info() is not None:
            first, second, third = np.random.SeedSequence(key).generate_state(3).tolist()
            random.seed(first)
            np.random.seed(second)
            paddle.seed(third)
        yield
    finally:
        _loading.key = None
