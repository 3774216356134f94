"""Computes the loss and the metrics' counts of each micro-batch on the last stage.

A metric of ``paddle.metric`` has two halves: ``compute`` takes outputs and labels, ``update`` takes
the results. The first runs on the last stage, the second on every rank with the results of all
replicas, so that the metrics of all ranks are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.dygraph.nest import map_tensors, outline
from fleetpipe.errors import ConfigError, reason
from fleetpipe.fit.feeding import as_list, as_tensor
from fleetpipe.paddle_api import paddle

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
