"""The loops of ``fit``, ``evaluate`` and ``predict``; every rank makes the same calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from fleetpipe.fit.callbacks.checkpoint import PipelineCheckpoint
from fleetpipe.fit.micro_batches import Rows, names_of, values_of
from fleetpipe.fit.position import BatchSource, Position
from fleetpipe.fit.runner import Runner

if TYPE_CHECKING:
    from paddle.hapi.callbacks import CallbackList

#: The dict that callbacks get: the loss in a list, metrics, "step" and "batch_size".
Logs = dict[str, Any]

#: By name, a number for each epoch: "loss", the metrics, and those of evaluations as "eval_loss".
History = dict[str, list[float]]


class Loop:
    """Runs batches, and calls the callbacks around them. Its methods are collective over the job.

    Attributes:
        left: How many batches may still run; None sets no limit.
        logs: The dict that callbacks get.
    """

    def __init__(
        self, model: Any, runner: Runner, callbacks: CallbackList, most: int | None = None
    ) -> None:
        """Prepares a loop, and runs nothing yet.

        Args:
            model: The ``fleetpipe.Model``, whose ``stop_training`` ends a training.
            runner: Runs the batches.
            callbacks: The callbacks; they are called around each batch, each epoch and the loop.
            most: The most batches to run; None sets no limit.
        """
        self._model = model
        self._runner = runner
        self._callbacks: Any = callbacks
        self._spending = runner.progress.wall_time.spending
        self._names = names_of(runner.metrics)
        self._mean = _Mean()
        self.left = most
        self.logs: Logs = {}

    def train(
        self,
        source: BatchSource,
        position: Position,
        saver: PipelineCheckpoint | None,
        *,
        epochs: int,
        accumulate: int,
        evaluation: BatchSource | None,
        eval_freq: int,
    ) -> History:
        """Trains from a position in the data to the end of the epochs, and returns the history.

        Args:
            source: Yields the batches of an epoch.
            position: The position in the data, which advances.
            saver: Saves after steps and epochs; None saves nothing.
            epochs: Number of epochs, those before the position included.
            accumulate: Batches whose gradients are added up for one step.
            evaluation: Yields the batches to evaluate at the end of epochs; None evaluates none.
            eval_freq: Epochs from one evaluation to the next.
        """
        logs: Logs = {}
        history: defaultdict[str, list[float]] = defaultdict(list)
        self._tell("on_begin", "train")
        if position.step == 0:
            position.put_callbacks_back()
        while position.epoch < epochs and self.left != 0 and not position.stopped:
            epoch = position.epoch
            self._tell("on_epoch_begin", epoch, {"step": position.step})
            position.put_callbacks_back()
            logs = self.run_epoch(source, position, saver, accumulate)
            self._note(history, {**logs, "loss": self._mean.value}, "")
            complete = self.left != 0 or position.step == source.steps
            if not complete and saver is not None:
                # Before callbacks step a rate: a resumed training ends this epoch.
                saver.cut_short()
            self._tell("on_epoch_end", epoch, logs)
            evaluated: Logs = {}
            if evaluation is not None and epoch % eval_freq == 0:
                evaluated = self._evaluate_epoch(evaluation, position)
                self._runner.progress.note(self._note(history, evaluated, "eval_"))
            position.stopped = self._runner.any_rank(self._model.stop_training)
            if complete:
                position.next_epoch()
                if saver is not None:
                    saver.epoch_done(epoch, evaluated)
        self._tell("on_end", "train", logs)
        return dict(history)

    def _note(self, history: History, logs: Logs, prefix: str) -> dict[str, float]:
        """Adds the loss and the metrics in the logs to the history, and returns them by name."""
        figures = {prefix + name: number for name, number in self._figures(logs).items()}
        for name, number in figures.items():
            history[name].append(number)
        return figures

    def _figures(self, logs: Logs) -> dict[str, float]:
        """Returns the loss and the metrics in the logs as numbers, by name."""
        values = {name: logs.get(name) for name in ("loss", *self._names)}
        return {
            name: float(value[0] if isinstance(value, list) else value)
            for name, value in values.items()
            if value is not None
        }

    def run_epoch(
        self,
        source: BatchSource,
        position: Position,
        saver: PipelineCheckpoint | None,
        accumulate: int = 1,
    ) -> Logs:
        """Trains on the rest of an epoch; see :meth:`train`."""
        self._model.mode = "train"
        self._mean = _Mean()
        waiting: list[tuple[int, Rows]] = []
        if position.step:
            self.logs.update(position.logs)

        def train() -> None:
            position.advance(len(waiting))
            self._step(waiting)
            names = ("loss", "step", "batch_size", *self._names)
            position.logs = {name: self.logs[name] for name in names}
            if saver is not None:
                saver.step_done()

        for step, rows in self._batches(source, position.step):
            self._tell("on_batch_begin", "train", step, self.logs)
            # Copies, since a loader may fill the same tensors again for the next batch.
            waiting.append((step, rows.copy() if accumulate > 1 else rows))
            if len(waiting) == accumulate:
                train()
        last = position.step + len(waiting) == source.steps
        if waiting and (self.left != 0 or last):
            train()
        if self.left == 0:
            position.hold_metrics()
        if waiting:
            # Too few batches for a step, as in paddle.Model: a resumed training repeats them.
            self._step(waiting, step=False)
        return self._end()

    def evaluate(self, source: BatchSource) -> Logs:
        """Returns the mean loss of all rows, and the metrics of all batches."""
        self._model.mode, most = "eval", self.left
        steps = source.steps if most is None else min(most, source.steps or most)
        self._mean = _Mean()
        self._end()  # a checkpoint, or an evaluation that failed, leaves counts in the metrics
        self._tell("on_begin", "eval", {"steps": steps, "metrics": self._model.metric_names})
        for step, rows in self._batches(source):
            self._tell("on_batch_begin", "eval", step, self.logs)
            loss, weight = self._runner.evaluate(rows)
            self._report("eval", step, rows, loss if self._runner.has_loss else None, weight)
        logs = self._end()
        if self._mean.value is not None:
            logs["loss"] = [self._mean.value]
        self._tell("on_end", "eval", logs)
        return logs

    def predict(self, source: BatchSource) -> list[list[np.ndarray]]:
        """Returns the outputs of each batch."""
        self._model.mode = "test"
        self._tell("on_begin", "predict", {"steps": source.steps})
        outputs = []
        for step, rows in self._batches(source):
            self._tell("on_batch_begin", "predict", step, self.logs)
            outputs.append(self._runner.predict(rows))
            self.logs.update(step=step, batch_size=rows.everywhere)
            self._tell("on_batch_end", "predict", step, self.logs)
        self._tell("on_end", "predict", self.logs)
        return outputs

    def _evaluate_epoch(self, source: BatchSource, position: Position) -> Logs:
        """Evaluates at the end of an epoch; its batches count in ``num_iters``, as in Paddle."""
        inner = Loop(self._model, self._runner, self._callbacks, self.left or None)
        with self._spending("evaluation"):
            logs = inner.evaluate(source)
        if self.left:
            position.taken += self.left - (inner.left or 0)
            self.left = inner.left
        return logs

    def _tell(self, hook: str, *arguments: Any) -> None:
        """Calls a method of the callbacks."""
        with self._spending("callbacks"):
            getattr(self._callbacks, hook)(*arguments)

    def _batches(self, source: BatchSource, taken: int = 0) -> Iterator[tuple[int, Rows]]:
        """Yields batches with their numbers, until the source ends or ``left`` is 0."""
        batches = enumerate(source.batches(taken), taken)
        while self.left != 0:
            with self._spending("data"):
                batch = next(batches, None)
            if batch is None:
                return
            if self.left is not None:
                self.left -= 1
            yield batch

    def _step(self, waiting: list[tuple[int, Rows]], step: bool = True) -> None:
        """Trains on the waiting batches with one step, or without, and reports each."""
        losses = self._runner.train([rows for _, rows in waiting], step)
        for loss, (number, rows) in zip(losses, waiting):
            self._runner.trained += step
            self._report("train", number, rows, loss)
        waiting.clear()

    def _report(
        self, mode: str, step: int, rows: Rows, loss: float | None, weight: float | None = None
    ) -> None:
        """Updates the logs for a batch, calls the callbacks, and notes the numbers for the board.

        Args:
            mode: "train" or "eval".
            step: The number of the batch.
            rows: The batch.
            loss: Its loss; None if there is no loss function.
            weight: The weight of the loss in the mean; None takes the number of rows.
        """
        if loss is not None:
            self.logs["loss"] = [loss]
            self._mean.add(loss, rows.everywhere if weight is None else weight)
        if self._names:
            self.logs.update(zip(self._names, values_of(self._runner.metrics)))
        self.logs.update(step=step, batch_size=rows.everywhere)
        self._tell("on_batch_end", mode, step, self.logs)
        if mode == "train":
            # ThroughputMonitor sets it, if it knows the tokens of a row.
            tokens = self.logs.get("tokens_per_second")
            rate = {} if tokens is None else {"tokens_per_second": tokens}
            self._runner.progress.note({**self._figures(self.logs), **rate})

    def _end(self) -> Logs:
        """Resets the metrics, and returns the logs."""
        for metric in self._runner.metrics:
            metric.reset()
        return self.logs


class _Mean:
    """The mean loss of batches, weighted by their rows, or by the tokens that count in them."""

    def __init__(self) -> None:
        self._sum, self._rows = 0.0, 0.0

    def add(self, loss: float, rows: float) -> None:
        self._sum += rows * loss
        self._rows += rows

    @property
    def value(self) -> float | None:
        """The mean; None if no batch had a loss."""
        return self._sum / self._rows if self._rows else None
