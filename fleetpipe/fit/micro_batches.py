"""Cuts an item of a data loader into micro-batches, and computes the loss and metrics of each.

A metric of ``paddle.metric`` has two halves: ``compute`` takes outputs and labels, ``update`` takes
the results. The first runs on the last stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.dygraph.nest import copy_tensors, leaves, map_tensors, outline
from fleetpipe.errors import ConfigError, reason
from fleetpipe.paddle_api import paddle

Columns = Sequence[Tensor]


class Rows(NamedTuple):
    """One item of a loader: the columns of some rows of this replica.

    Attributes:
        inputs: Tensors [rows, ..] for the first stage.
        labels: Tensors [rows, ..] for the loss.
        rows: Their number.
        real: How many of them count; the others fill the last batch up to the size that all
            replicas have.
        everywhere: How many rows count in all replicas together.
    """

    inputs: Columns
    labels: Columns
    rows: int
    real: int
    everywhere: int

    def copy(self) -> Rows:
        """Returns the rows in copies of the tensors."""
        return self._replace(
            inputs=copy_tensors([*self.inputs]), labels=copy_tensors([*self.labels])
        )


class RowCut(NamedTuple):
    """A batch that is cut into micro-batches.

    Attributes:
        data: ``[inputs, labels]``, each a list of one value per micro-batch, or still uncut.
        rows: The number of rows of each micro-batch.
    """

    data: list[Nest]
    rows: tuple[int, ...]

    @property
    def weights(self) -> list[Fraction]:
        """The share of each micro-batch in a mean over rows."""
        return [Fraction(rows, sum(self.rows)) for rows in self.rows]


def rows_of(item: Nest, inputs: int, replica: int, replicas: int, left: int | None) -> Rows:
    """Reads one item of a loader.

    Args:
        item: Tensors or arrays, in any nest of lists, tuples and dicts; inputs first, then labels.
            Entries of a dict come in the order of their keys, as in ``paddle.Model``.
        inputs: Number of its first columns that are inputs.
        replica: Number of this replica.
        replicas: Number of replicas. Each has an item of this size; the dataset has the items' rows
            in the order of the replicas.
        left: Rows of the dataset that this and later batches hold in all replicas together; None if
            it is unknown, so that every row counts.

    Raises:
        ConfigError: The item has fewer columns, or they differ in their number of rows.
    """
    columns = [as_tensor(column) for _, column in sorted(leaves(item), key=lambda leaf: leaf[0])]
    counts = {column.shape[0] if column.ndim else -1 for column in columns}
    if len(columns) < inputs or len(counts) != 1 or -1 in counts:
        raise ConfigError(
            "each item of the data is inputs and labels, with as many rows each",
            expected=f"{inputs} inputs, and the labels behind them",
            got=", ".join(str(list(column.shape)) for column in columns) or "nothing",
            fix="return (input, label) from the dataset, or pass Model(.., inputs=[InputSpec(..), "
            "..]) with one for each input",
        )
    rows: int = counts.pop()
    everywhere = rows * replicas if left is None else min(left, rows * replicas)
    real = max(0, min(rows, everywhere - replica * rows))
    return Rows(columns[:inputs], columns[inputs:], rows, real, everywhere)


def in_micro_batches(rows: Rows, count: int) -> RowCut:
    """Cuts the rows of a batch into ``count`` micro-batches, or into one for each row.

    Their sizes differ by one at most, the larger first.
    """
    count = min(count, rows.rows)
    small, larger = divmod(rows.rows, count)
    sizes = [small + 1] * larger + [small] * (count - larger)
    inputs, labels = _parts(rows.inputs, sizes), _parts(rows.labels, sizes)
    return RowCut([inputs, labels], tuple(sizes))


def whole(columns: Columns, rows: int) -> Nest:
    """Returns the first ``rows`` rows of each column, in the form of :func:`value_of`."""
    return value_of([column if column.shape[0] == rows else column[:rows] for column in columns])


def value_of(columns: Columns) -> Nest:
    """Returns a single column itself, several as a tuple, and None if there are none."""
    if not columns:
        return None
    return columns[0] if len(columns) == 1 else tuple(columns)


def join_cuts(cuts: Iterable[RowCut]) -> RowCut:
    """Returns one cut with the micro-batches of several batches."""
    inputs: list[Nest] = []
    labels: list[Nest] = []
    rows: list[int] = []
    for cut in cuts:
        inputs += cut.data[0]
        labels += cut.data[1]
        rows += cut.rows
    return RowCut([inputs, labels], tuple(rows))


def _parts(columns: Columns, sizes: Sequence[int]) -> list[Nest]:
    """Returns the columns of each part, in the form of :func:`value_of`."""
    parts = list(zip(*(_cut(column, sizes) for column in columns)))
    if not columns:
        return [None] * len(sizes)
    return [part[0] for part in parts] if len(columns) == 1 else list(parts)


def _cut(column: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
    start = 0
    for size in sizes:
        yield column[start : start + size]
        start += size


def as_list(value: Nest) -> list[Nest]:
    """Returns a list or tuple as a list, another value in a list, and None as an empty list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def as_tensor(value: Nest) -> Tensor:
    """Returns a Tensor unchanged, and an array or a number as a Tensor."""
    return value if isinstance(value, paddle.Tensor) else paddle.to_tensor(value)


#: A ``paddle.metric.Metric``, or any object with its methods.
Metric = Layer


class Criterion(paddle.nn.Layer):
    """The loss function of a pipeline, which also runs the metrics' ``compute``."""

    def __init__(
        self, loss: Callable[..., Nest] | None, counting: Counting, in_parts: bool = False
    ) -> None:
        """Takes the loss; if it is a Layer it becomes a sublayer.

        Args:
            loss: ``loss(*outputs, *labels)`` returns a Tensor with one element, or several to add
                up. None computes metrics only.
            counting: Runs the metrics.
            in_parts: Whether the output is a vocabulary head's, which the loss takes as one.
        """
        super().__init__()
        self._in_parts = in_parts
        self._loss = loss
        self._counting = counting

    @property
    def declares(self) -> Callable[..., Nest] | None:
        """The function that declares of how many positions the loss is the mean."""
        return self._loss

    def __call__(self, output: Nest, label: Nest) -> Tensor:
        """Returns the loss of one micro-batch.

        It runs no hooks: a Layer's own call looks for them, which takes half as long as a loss.
        """
        columns = [*([output] if self._in_parts else as_list(output)), *as_list(label)]
        self._counting.look(columns)
        if self._loss is None:
            return paddle.zeros([])
        losses = as_list(self._loss(*columns))
        return losses[0] if len(losses) == 1 else paddle.add_n(losses)


class Counting:
    """The results of the metrics' ``compute`` for one batch, and which of its rows count."""

    def __init__(self, metrics: Sequence[Metric], micro_batch: Callable[[], int]) -> None:
        """Starts without a batch.

        Args:
            metrics: The metrics of ``Model.prepare``.
            micro_batch: Returns the number of the micro-batch that runs.
        """
        self._metrics = metrics
        self._micro_batch = micro_batch
        self._real: Sequence[int] = ()
        self._computed: dict[int, list[list[Tensor]]] = {}

    def begin(self, real: Sequence[int]) -> None:
        """Starts a batch, and forgets the one before.

        Args:
            real: How many rows of each micro-batch count in the metrics, from its first on.
        """
        self._real = real
        self._computed = {}

    def look(self, columns: Sequence[Nest]) -> None:
        """Calls ``compute`` of each metric for the micro-batch that runs."""
        if not self._metrics:
            return
        number = self._micro_batch()
        # The micro-batches behind those that count are of one row that does not.
        real = number < len(self._real) and self._real[number]
        with paddle.no_grad():
            seen = [map_tensors(lambda tensor: tensor.detach(), column) for column in columns]
            self._computed[number] = [
                [as_tensor(value) for value in as_list(_compute(metric, seen))]
                for metric in (self._metrics if real else ())
            ]

    def results(self) -> list[list[list[Tensor]]]:
        """Returns the results of ``compute``: by micro-batch, metric, and value of the metric."""
        return [self._computed[number] for number in sorted(self._computed)]

    def update(self, computed: Sequence[list[list[list[Tensor]]]]) -> None:
        """Calls ``update`` of each metric with the results of all replicas.

        Args:
            computed: What each replica's :meth:`results` returned, in the order of the replicas.
        """
        for replica in computed:
            for micro_batch in replica:
                for metric, values in zip(self._metrics, micro_batch):
                    metric.update(*(np.asarray(value.numpy()) for value in values))


def names_of(metrics: Sequence[Metric]) -> list[str]:
    """Returns the names of all values of the metrics."""
    return [name for metric in metrics for name in as_list(metric.name())]


def values_of(metrics: Sequence[Metric]) -> list[Nest]:
    """Returns the current values of the metrics, in the order of :func:`names_of`."""
    return [value for metric in metrics for value in as_list(metric.accumulate())]


def _compute(metric: Metric, columns: Sequence[Nest]) -> Nest:
    try:
        return metric.compute(*columns)
    except Exception as error:
        raise ConfigError(
            f"the metric {type(metric).__name__} cannot take the model's outputs and the labels",
            where="last stage",
            got=", ".join(map(outline, columns)),
            cause=reason(error),
            fix="give prepare(metrics=) one whose compute(*outputs, *labels) takes these",
        ) from error
