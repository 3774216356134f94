"""What micro-batches of a batch are, said a second time: the reference does not trust dygraph's.

One micro-batch is picked out of the batch at a time, by its number. What does not fit is refused by
the pipeline, which looks at the same batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any

from fleetpipe.aliases import Nest
from fleetpipe.dygraph.batch.micro_batches import MicroBatches
from fleetpipe.dygraph.nest import rebuilt
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.meta_parallel import PipelineDatasetPreprocessor
from fleetpipe.parity.differences import Difference, compare_numbers


class RepeatedBatch:
    """A batch as the user gave it, to be looked at as often as needed.

    A preprocessor is called once, and exactly the items of one step are taken of an iterator.
    """

    def __init__(self, data: Any, count: int) -> None:
        """Takes what the user gave.

        Args:
            data: Anything that ``train_batch`` takes.
            count: The items that a step takes of an iterator: ``accumulate_steps``.
        """
        self._count = count
        self._preprocessor = type(data) if isinstance(data, PipelineDatasetPreprocessor) else None
        data = data() if self._preprocessor else data
        self._is_iterator = hasattr(type(data), "__next__")
        self._data = list(_first(data, count)) if self._is_iterator else data
        self._taken = 0

    def again(self) -> Any:
        """Returns the batch in the form in which the user gave it."""
        data = self._iterator() if self._is_iterator else self._data
        return self._preprocessor(lambda: data) if self._preprocessor else data

    def differences(self, step: int) -> list[Difference]:
        """Says whether other than all items were taken of the last iterator that was given."""
        if not self._is_iterator:
            return []
        items = len(self._data)
        return compare_numbers("micro-batch", "the iterator, taken", step, self._taken, items)

    def parts(self) -> tuple[Nest, Nest]:
        """Returns the inputs and the labels of the batch; of an iterator as lists."""
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
        count: How many micro-batches a container without any tensor or list has.
    """
    if value is None:
        return None
    rows = _count(value, size)
    return [_pick(value, number, size) for number in range(count if rows is None else rows)]


def shares_of_rows(value: Nest, size: int) -> list[Fraction] | None:
    """Returns which part of all rows is in each micro-batch; None for a batch that was given cut.

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
    """Returns a copy of a micro-batch: a model may work in place."""
    if isinstance(value, paddle.Tensor):
        return value.detach().clone()
    return _same(value, [copy_of(part) for part in _parts(value)])


def _count(value: Nest, size: int) -> int | None:
    """Returns how many micro-batches a value has; None where it has none to tell."""
    if isinstance(value, paddle.Tensor):
        return len(range(0, value.shape[0], size))
    if isinstance(value, list):
        return len(value)
    if isinstance(value, (tuple, dict)):
        counts = (_count(part, size) for part in _parts(value))
        return next((count for count in counts if count is not None), None)
    return None


def _pick(value: Nest, number: int, size: int) -> Nest:
    """Returns micro-batch ``number`` of a value that is a whole batch."""
    if isinstance(value, paddle.Tensor):
        return copy_of(value[number * size : (number + 1) * size])
    if isinstance(value, list):
        return copy_of(value[number])
    return _same(value, [_pick(part, number, size) for part in _parts(value)])


def _parts(value: Nest) -> list[Nest]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (tuple, list)) else []


def _same(value: Nest, parts: list[Nest]) -> Nest:
    """Returns a container like ``value`` of other parts; what is no container as it is."""
    if isinstance(value, dict):
        return dict(zip(value, parts))
    if isinstance(value, (tuple, list)):
        return rebuilt(value, parts)
    return value


def _first(items: Iterable[Nest], count: int) -> Iterator[Nest]:
    """Yields some first items, and takes no more than these."""
    for _, item in zip(range(count), items):
        yield item
