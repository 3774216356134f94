"""One pass over the data, in which every rank calls the same callbacks alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from fleetpipe.aliases import Nest
from fleetpipe.fit.criterion import Metric
from fleetpipe.fit.feeding import Rows
from fleetpipe.fit.position import Position
from fleetpipe.fit.runner import Runner
from fleetpipe.fit.sources import Source

#: What callbacks are told: the loss in a list, metrics, "step" and "batch_size".
Logs = dict[str, Any]


class Callbacks(Protocol):
    """Paddle's ``CallbackList``."""

    callbacks: list[Any]

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


def _nothing() -> None:
    """Does nothing."""


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
        self._names = names_of(metrics)
        self.left = most
        self.logs: Logs = {}

    def train(
        self,
        source: Source,
        position: Position,
        accumulate: int = 1,
        step_done: Callable[[], None] = _nothing,
    ) -> Logs:
        """Trains on the batches that are left of an epoch.

        Args:
            source: Gives them.
            position: Says how many were trained before, and counts.
            accumulate: So many, and those at the end, make a step.
            step_done: Called after each step.
        """
        waiting: list[tuple[int, Rows]] = []
        told = ("loss", "step", "batch_size", *self._names)
        if position.step:
            self.logs.update(position.told)

        def train() -> None:
            position.advance(len(waiting))
            self._step(waiting)
            position.told = {name: self.logs[name] for name in told}
            step_done()

        for step, rows in self._some(source, position.step):
            self._callbacks.on_batch_begin("train", step, self.logs)
            waiting.append((step, rows))
            if len(waiting) == accumulate:
                train()
        ends = position.step + len(waiting) == source.steps
        if waiting and (self.left != 0 or ends):
            train()
        if self.left == 0:
            position.hold_metrics()
        if waiting:
            # Batches that make no step, as in paddle.Model: who goes on has them once more.
            self._step(waiting, step=False)
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

    def _some(self, source: Source, taken: int = 0) -> Iterator[tuple[int, Rows]]:
        batches = enumerate(source.batches(taken), taken)
        while self.left != 0:
            batch = next(batches, None)
            if batch is None:
                return
            if self.left is not None:
                self.left -= 1
            yield batch

    def _step(self, waiting: list[tuple[int, Rows]], step: bool = True) -> None:
        losses = self._runner.train([rows for _, rows in waiting], step)
        for loss, (number, rows) in zip(losses, waiting):
            self._runner.trained += step
            self._tell("train", number, rows, loss)
        waiting.clear()

    def _tell(self, mode: str, step: int, rows: Rows, loss: float | None) -> None:
        if loss is not None:
            self.logs["loss"] = [loss]
        if self._metrics:
            self.logs.update(zip(self._names, values_of(self._metrics)))
        self.logs.update(step=step, batch_size=rows.everywhere)
        self._callbacks.on_batch_end(mode, step, self.logs)

    def _end(self) -> Logs:
        for metric in self._metrics:
            metric.reset()
        return self.logs


def names_of(metrics: Sequence[Metric]) -> list[str]:
    """Returns the names of all values of the metrics."""
    return [name for metric in metrics for name in _listed(metric.name())]


def values_of(metrics: Sequence[Metric]) -> list[Any]:
    """Returns what the metrics have come to, in the order of their names."""
    return [value for metric in metrics for value in _listed(metric.accumulate())]


def _listed(value: Nest) -> list[Nest]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
