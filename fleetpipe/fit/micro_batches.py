"""Cuts an item of a data loader into micro-batches, and computes the loss and metrics of each.

A metric of ``paddle.metric`` has two methods: ``compute`` takes outputs and labels, and runs on the
last stage; ``update`` takes the results, and runs on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.dygraph.nest import copy_tensors, leaves, map_tensors, outline
from fleetpipe.errors import ConfigError, reason
from fleetpipe.paddle_api import paddle

#: The tensors of a batch, each of shape [rows, ..].
Columns = Sequence[Tensor]

#: The type of a ``paddle.metric.Metric``, or of any object with its methods.
Metric = Layer


class Rows(NamedTuple):
    """A batch of this replica: one item of a loader.

    Attributes:
        inputs: Tensors [rows, ..] for the first stage.
        labels: Tensors [rows, ..] for the loss.
        rows: The number of rows.
        real: How many of the rows count: the first ones. The others repeat rows, so that all
            replicas have batches of one size.
        everywhere: The number of rows that count in all replicas together.
    """

    inputs: Columns
    labels: Columns
    rows: int
    real: int
    everywhere: int

    def copy(self) -> Rows:
        """Returns the same batch in copies of the tensors."""
        return self._replace(
            inputs=copy_tensors([*self.inputs]), labels=copy_tensors([*self.labels])
        )


class RowCut(NamedTuple):
    """A batch that is cut into micro-batches.

    Attributes:
        data: ``[inputs, labels]``, each a list with a value for each micro-batch, or uncut tensors
            that the pipeline cuts.
        rows: The number of rows of each micro-batch.
    """

    data: list[Nest]
    rows: tuple[int, ...]

    @property
    def weights(self) -> list[Fraction]:
        """The fraction of the rows in each micro-batch, its weight in a mean over rows."""
        return [Fraction(rows, sum(self.rows)) for rows in self.rows]


def batch_from_item(
    item: Nest, inputs: int, replica: int, replicas: int, rows_left: int | None
) -> Rows:
    """Returns one item of a loader as a batch of this replica.

    Args:
        item: The columns, tensors or arrays, in any nest of lists, tuples and dicts; inputs first,
            then labels. Entries of a dict are read in the order of their keys, as in
            ``paddle.Model``.
        inputs: How many of the columns are inputs; the others are labels.
        replica: The index of this replica.
        replicas: The number of replicas. Each has an item of this size; the dataset has the items'
            rows in the order of the replicas.
        rows_left: How many rows of the dataset are left for this and later batches of all replicas
            together: if these are fewer than the batch has, its last rows repeat others and do not
            count. None if unknown: then every row counts.

    Raises:
        ConfigError: The item has fewer than ``inputs`` columns, or they differ in their number of
            rows.
    """
    # A leaf is a path of keys and indices in the item, and the value there.
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
    everywhere = rows * replicas if rows_left is None else min(rows_left, rows * replicas)
    real = max(0, min(rows, everywhere - replica * rows))
    return Rows(columns[:inputs], columns[inputs:], rows, real, everywhere)


def cut_into_micro_batches(rows: Rows, count: int) -> RowCut:
    """Returns a batch cut into ``count`` micro-batches, or into fewer if it has fewer rows.

    Their numbers of rows differ by at most one; larger micro-batches come first.
    """
    count = min(count, rows.rows)
    small, larger = divmod(rows.rows, count)
    sizes = [small + 1] * larger + [small] * (count - larger)
    inputs, labels = _split_columns(rows.inputs, sizes), _split_columns(rows.labels, sizes)
    return RowCut([inputs, labels], tuple(sizes))


def first_rows(columns: Columns, rows: int) -> Nest:
    """Returns the first ``rows`` rows of each column, in the form of :func:`single_or_tuple`."""
    return single_or_tuple(
        [column if column.shape[0] == rows else column[:rows] for column in columns]
    )


def single_or_tuple(columns: Columns) -> Nest:
    """Returns a single column itself, several as a tuple, and None if there are none."""
    if not columns:
        return None
    return columns[0] if len(columns) == 1 else tuple(columns)


def join_cuts(cuts: Sequence[RowCut]) -> RowCut:
    """Returns one cut with the micro-batches of several batches."""
    inputs, labels = ([part for cut in cuts for part in cut.data[side]] for side in (0, 1))
    return RowCut([inputs, labels], tuple(rows for cut in cuts for rows in cut.rows))


def _split_columns(columns: Columns, sizes: Sequence[int]) -> list[Nest]:
    """Returns the rows of each micro-batch, in the form of :func:`single_or_tuple`.

    Args:
        columns: The columns of a batch.
        sizes: The number of rows of each micro-batch.
    """
    ends = list(accumulate(sizes))
    ranges = [slice(end - size, end) for end, size in zip(ends, sizes)]
    return [single_or_tuple([column[rows] for column in columns]) for rows in ranges]


def as_list(value: Nest) -> list[Nest]:
    """Returns a list or tuple as a list, another value in a list, and None as an empty list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def as_tensor(value: Nest) -> Tensor:
    """Returns a Tensor unchanged, and an array or a number as a Tensor."""
    return value if isinstance(value, paddle.Tensor) else paddle.to_tensor(value)


class Criterion(paddle.nn.Layer):
    """The loss function of a ``Model``'s pipeline; it also calls ``compute`` of the metrics."""

    def __init__(
        self, loss: Callable[..., Nest] | None, counting: MetricCounter, in_parts: bool = False
    ) -> None:
        """Stores the loss; a Layer becomes a sublayer.

        Args:
            loss: ``loss(*outputs, *labels)`` returns a Tensor with one element, or several to add
                up. None computes metrics only.
            counting: Runs the metrics.
            in_parts: Whether the output comes from a vocabulary head, in shards: it is then one
                argument of the loss.
        """
        super().__init__()
        self._in_parts = in_parts
        self._loss = loss
        self._counting = counting

    @property
    def declares(self) -> Callable[..., Nest] | None:
        """The user's loss function, which may declare over how many positions it takes the mean.

        The pipeline reads this when it weights micro-batches by their tokens.
        """
        return self._loss

    def __call__(self, output: Nest, label: Nest) -> Tensor:
        """Returns the loss of one micro-batch.

        Hooks of a Layer do not run: the search for them takes half as long as a loss.
        """
        columns = [*([output] if self._in_parts else as_list(output)), *as_list(label)]
        self._counting.compute(columns)
        if self._loss is None:
            return paddle.zeros([])
        losses = as_list(self._loss(*columns))
        return losses[0] if len(losses) == 1 else paddle.add_n(losses)


class MetricCounter:
    """Runs the metrics: ``compute`` on the last stage, and ``update`` on every rank."""

    def __init__(self, metrics: Sequence[Metric], micro_batch: Callable[[], int]) -> None:
        """Stores the metrics; :meth:`begin` starts a batch.

        Args:
            metrics: The metrics of ``Model.prepare``.
            micro_batch: Returns the number of the running micro-batch.
        """
        self._metrics = metrics
        self._micro_batch = micro_batch
        #: The number of rows of each micro-batch that count.
        self._real: Sequence[int] = ()
        #: The results of ``compute`` by micro-batch: for each metric a list of tensors.
        self._results: dict[int, list[list[Tensor]]] = {}

    def begin(self, real: Sequence[int]) -> None:
        """Starts a batch, and drops the results of the last one.

        Args:
            real: The number of rows of each micro-batch that count in the metrics.
        """
        self._real = real
        self._results = {}

    def compute(self, columns: Sequence[Nest]) -> None:
        """Calls ``compute`` of each metric for the running micro-batch, with outputs and labels."""
        if not self._metrics:
            return
        number = self._micro_batch()
        # Further micro-batches have one row, which does not count.
        real = number < len(self._real) and self._real[number]
        with paddle.no_grad():
            detached = [map_tensors(lambda tensor: tensor.detach(), column) for column in columns]
            self._results[number] = [
                [as_tensor(value) for value in as_list(_compute_metric(metric, detached))]
                for metric in (self._metrics if real else ())
            ]

    def results(self) -> list[list[list[Tensor]]]:
        """Returns the results of ``compute``: for each micro-batch and metric a list of tensors."""
        return [self._results[number] for number in sorted(self._results)]

    def update(self, computed: Sequence[list[list[list[Tensor]]]]) -> None:
        """Calls ``update`` of each metric with the results of all replicas.

        Args:
            computed: The :meth:`results` of each replica, in the order of the replicas.
        """
        for replica in computed:
            for micro_batch in replica:
                for metric, values in zip(self._metrics, micro_batch):
                    metric.update(*(np.asarray(value.numpy()) for value in values))


def metric_names_of(metrics: Sequence[Metric]) -> list[str]:
    """Returns the names of all values of the metrics; a metric may have several."""
    return [name for metric in metrics for name in as_list(metric.name())]


def metric_values_of(metrics: Sequence[Metric]) -> list[Nest]:
    """Returns the current values of the metrics, in the order of :func:`metric_names_of`."""
    return [value for metric in metrics for value in as_list(metric.accumulate())]


def _compute_metric(metric: Metric, columns: Sequence[Nest]) -> Nest:
    """Returns the result of a metric's ``compute``; raises ConfigError if the call fails."""
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
