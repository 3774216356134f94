"""Cuts a batch into micro-batches by code of its own, as a check of the pipeline's cut.

It picks one micro-batch at a time out of the batch, by its number. It checks nothing: the pipeline
gets the same batch, and refuses one that does not fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import islice
from typing import Any

from fleetpipe.aliases import Nest
from fleetpipe.compare.differences import Difference, compare_numbers
from fleetpipe.dygraph.batch.micro_batches import MicroBatches
from fleetpipe.dygraph.nest import map_tensors, rebuild
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.meta_parallel import PipelineDatasetPreprocessor


class RepeatedBatch:
    """A user's batch that can be passed to several calls.

    It calls a preprocessor once, and takes exactly the items of one step from an iterator.
    """

    def __init__(self, data: Any, count: int) -> None:
        """Takes a batch from the user's data.

        Args:
            data: Anything that ``train_batch`` takes.
            count: The number of items that a step takes from an iterator: ``accumulate_steps``.
        """
        self._count = count
        self._preprocessor = type(data) if isinstance(data, PipelineDatasetPreprocessor) else None
        data = data() if self._preprocessor else data
        self._is_iterator = hasattr(type(data), "__next__")
        self._data = list(islice(data, count)) if self._is_iterator else data
        self._taken = 0

    def again(self) -> Any:
        """Returns the batch once more, in the form of the user's data."""
        data = self._iterator() if self._is_iterator else self._data
        return self._preprocessor(lambda: data) if self._preprocessor else data

    def differences(self, step: int) -> list[Difference]:
        """Returns a difference if the last iterator did not have exactly all its items taken."""
        if not self._is_iterator:
            return []
        items = len(self._data)
        return compare_numbers("micro-batch", "the iterator, taken", step, self._taken, items)

    def parts(self) -> tuple[Nest, Nest]:
        """Returns the inputs and the labels of the batch; lists if the data are an iterator."""
        if not self._is_iterator:
            return (None, None) if self._data is None else tuple(self._data)
        inputs, labels = [list(part) for part in zip(*self._data)]
        return inputs, labels

    def cut(self, size: int) -> MicroBatches:
        """Cuts the batch into micro-batches of ``size`` rows."""
        return MicroBatches(*(cut(part, size, self._count) for part in self.parts()))

    def _iterator(self) -> Iterator[Nest]:
        self._taken = 0
        for item in self._data:
            self._taken += 1
            yield item
        self._taken += 1


def cut(value: Nest, size: int, count: int) -> list[Nest] | None:
    """Returns the micro-batches of the inputs, or of the labels, of a batch.

    Args:
        value: The whole batch.
        size: Rows of a micro-batch.
        count: The number of micro-batches, each with ``value`` itself, where ``value`` is a
            container without any tensor or list.
    """
    if value is None:
        return None
    pieces = _pieces(value, size)
    return [value] * count if pieces is None else pieces


def shares_of_rows(value: Nest, size: int) -> list[Fraction] | None:
    """Returns each micro-batch's share of all rows; None for a batch that was given cut.

    Args:
        value: The labels of a batch.
        size: Rows of a micro-batch.
    """
    if isinstance(value, (tuple, dict)):
        of_parts = (shares_of_rows(part, size) for part in _parts(value))
        return next((shares for shares in of_parts if shares), None)
    if not isinstance(value, paddle.Tensor):
        return None
    rows = value.shape[0]
    return [Fraction(min(size, rows - first), rows) for first in range(0, rows, size)]


def copy_of(value: Nest) -> Nest:
    """Returns a copy of a micro-batch, into which a model may write."""
    return map_tensors(lambda tensor: tensor.detach().clone(), value)


def _pieces(value: Nest, size: int) -> list[Nest] | None:
    """Returns the micro-batches of a value; None if it has no tensor and no list."""
    if isinstance(value, paddle.Tensor):
        return [copy_of(value[n : n + size]) for n in range(0, value.shape[0], size)]
    if isinstance(value, list):
        return [copy_of(item) for item in value]
    pieces = [_pieces(part, size) for part in _parts(value)]
    count = next((len(one) for one in pieces if one is not None), None)
    if count is None:
        return None
    parts = [
        [part if one is None else one[number] for one, part in zip(pieces, _parts(value))]
        for number in range(count)
    ]
    if isinstance(value, dict):
        return [dict(zip(value, of_one)) for of_one in parts]
    return [rebuild(value, of_one) for of_one in parts]


def _parts(value: Nest) -> list[Nest]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (tuple, list)) else []
