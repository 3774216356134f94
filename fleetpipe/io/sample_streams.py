"""Random numbers for the loading of a sample, which depend on seed, epoch and the sample alone.

So an augmentation draws the same whichever worker loads the sample, of however many, in whatever
run. In a worker the streams of ``random``, of NumPy and of Paddle are set before each sample, which
takes about 30 us there. In the process that trains they belong to the training and stay as they
are; what draws from :func:`sample_generator` is repeatable in both.
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

#: Follows the key of a batch's first sample in the key of what joins the batch.
_JOINING = 1

_loading = threading.local()


class Key(NamedTuple):
    """What the number of a sample becomes on its way to a worker."""

    seed: int
    epoch: int
    number: int


class Loaded(NamedTuple):
    """A sample on its way to what joins the batch."""

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
        """Gives what a ``worker_init_fn`` asks its ``get_worker_info().dataset`` for."""
        return getattr(self._dataset, name)


class KeyedCollate:
    """Joins samples to a batch, with random numbers that belong to the batch's first sample."""

    def __init__(self, collate: Callable[[Any], Any] | None, alone: bool) -> None:
        """Takes the function of the user's.

        Args:
            collate: Is called with a list of samples; None for Paddle's own.
            alone: Whether a sample is a batch already, which ``collate`` is called with.
        """
        self._collate: Callable[[Any], Any] = collate or (
            default_convert_fn if alone else default_collate_fn
        )
        self._alone = alone

    def __call__(self, loaded: Sequence[Loaded]) -> Any:
        """Returns the batch."""
        with _streams(*loaded[0].key, _JOINING):
            if self._alone:
                return self._collate(loaded[0].sample)
            return self._collate([one.sample for one in loaded])


def sample_generator() -> np.random.Generator:
    """Returns random numbers for the sample that is being loaded, or for the batch being joined.

    To be called by a dataset's ``__getitem__`` or a ``collate_fn``, below a
    :class:`~fleetpipe.io.DataLoader`. They depend on the loader's seed, the epoch and the sample's
    index alone; called again for the same sample it begins them anew.

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
