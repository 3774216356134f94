"""One pass over the data, in which every rank calls the same callbacks alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from fleetpipe.aliases import Nest
from fleetpipe.fit.criterion import Metric
from fleetpipe.fit.feeding import Rows, rows_of
from fleetpipe.fit.runner import Runner

#: What callbacks are told: the loss in a list, metrics, "step" and "batch_size".
Logs = dict[str, Any]


class Callbacks(Protocol):
    """Paddle's ``CallbackList``."""

    def on_begin(self, mode: str, logs: Logs | None = None) -> None:
        """Called before the passes of a call."""

    def on_end(self, mode: str, logs: Logs | None = None) -> None:
        """Called after them."""

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Called before an epoch."""

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Called after an epoch."""

    def on_batch_begin(self, mode: str, step: int, logs: Logs) -> None:
        """Called before a batch."""

    def on_batch_end(self, mode: str, step: int, logs: Logs) -> None:
        """Called after a batch."""


class Source(NamedTuple):
    """Where batches come from.

    Attributes:
        loader: Gives items; a list, a generator or a ``paddle.io.DataLoader``.
        samples: Rows of the whole dataset, in its order; None where each row of an item counts.
        inputs: Number of columns of an item that are inputs.
        replica: Number of this replica.
        replicas: Number of replicas.
    """

    loader: Iterable[Nest]
    samples: int | None
    inputs: int
    replica: int
    replicas: int

    @property
    def steps(self) -> int | None:
        """Number of batches of a pass; None where the loader does not know."""
        try:
            return len(self.loader)  # type: ignore[arg-type]
        except TypeError:
            return None

    def batches(self) -> Iterator[Rows]:
        """Yields the batches of one pass."""
        left = self.samples
        for item in self.loader:
            rows = rows_of(item, self.inputs, self.replica, self.replicas, left)
            if left is not None:
                left -= rows.everywhere
            yield rows


class Pass:
    """Runs the batches of one source; keeps what callbacks are told."""

    def __init__(
        self, runner: Runner, callbacks: Callbacks, metrics: Sequence[Metric], most: int | None
    ) -> None:
        """Begins nothing.

        Args:
            runner: Runs the batches.
            callbacks: Called around each.
            metrics: Told to the callbacks, and reset at the end of a pass.
            most: Most batches to run in all passes together; None: all.
        """
        self._runner = runner
        self._callbacks = callbacks
        self._metrics = metrics
        self.left = most
        self.logs: Logs = {}

    def train(self, source: Source, accumulate: int = 1) -> Logs:
        """Trains on every batch; one step for each ``accumulate`` of them, and for the last."""
        waiting: list[tuple[int, Rows]] = []
        for step, rows in self._some(source):
            self._callbacks.on_batch_begin("train", step, self.logs)
            waiting.append((step, rows))
            if len(waiting) == accumulate:
                self._step(waiting)
        self._step(waiting)
        return self._end()

    def evaluate(self, source: Source, with_loss: bool) -> Logs:
        """Has the metrics count every batch."""
        for step, rows in self._some(source):
            self._callbacks.on_batch_begin("eval", step, self.logs)
            loss = self._runner.evaluate(rows)
            self._tell("eval", step, rows, loss if with_loss else None)
        return self._end()

    def predict(self, source: Source) -> list[list[np.ndarray]]:
        """Returns the outputs of each batch."""
        outputs = []
        for step, rows in self._some(source):
            self._callbacks.on_batch_begin("predict", step, self.logs)
            outputs.append(self._runner.predict(rows))
            self.logs.update(step=step, batch_size=rows.everywhere)
            self._callbacks.on_batch_end("predict", step, self.logs)
        return outputs

    def _some(self, source: Source) -> Iterator[tuple[int, Rows]]:
        for step, rows in enumerate(source.batches()):
            if self.left == 0:
                return
            if self.left is not None:
                self.left -= 1
            yield step, rows

    def _step(self, waiting: list[tuple[int, Rows]]) -> None:
        if waiting:
            losses = self._runner.train([rows for _, rows in waiting])
            for (step, rows), loss in zip(waiting, losses):
                self._runner.trained += 1
                self._tell("train", step, rows, loss)
            waiting.clear()

    def _tell(self, mode: str, step: int, rows: Rows, loss: float | None) -> None:
        if loss is not None:
            self.logs["loss"] = [loss]
        self.logs.update(values_of(self._metrics))
        self.logs.update(step=step, batch_size=rows.everywhere)
        self._callbacks.on_batch_end(mode, step, self.logs)

    def _end(self) -> Logs:
        for metric in self._metrics:
            metric.reset()
        return self.logs


def names_of(metrics: Sequence[Metric]) -> list[str]:
    """Returns the names of all values of the metrics."""
    return [name for metric in metrics for name in _listed(metric.name())]


def values_of(metrics: Sequence[Metric]) -> Logs:
    """Returns what the metrics have come to, by name."""
    values = [value for metric in metrics for value in _listed(metric.accumulate())]
    return dict(zip(names_of(metrics), values))


def _listed(value: Nest) -> list[Nest]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
