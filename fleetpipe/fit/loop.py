"""Runs the loops of ``fit``, ``evaluate`` and ``predict``; every rank makes the same calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from fleetpipe.fit.callbacks.checkpoint import PipelineCheckpoint
from fleetpipe.fit.micro_batches import Rows, metric_names_of, metric_values_of
from fleetpipe.fit.position import BatchSource, Position
from fleetpipe.fit.runner import Runner

if TYPE_CHECKING:
    from paddle.hapi.callbacks import CallbackList

#: The dict that callbacks get: the loss in a list, metrics, "step" and "batch_size".
Logs = dict[str, Any]

#: Numbers by name, one for each epoch: "loss", the metrics, and those of evaluations ("eval_loss").
History = dict[str, list[float]]


class Loop:
    """Runs batches, and calls the callbacks around them. Its methods are collective over the job.

    Attributes:
        left: The number of batches that may still run; None sets no limit.
        logs: The dict that callbacks get.
    """

    def __init__(
        self, model: Any, runner: Runner, callbacks: CallbackList, limit: int | None = None
    ) -> None:
        """Prepares a loop, and runs nothing yet.

        Args:
            model: The ``fleetpipe.Model``, whose ``stop_training`` ends a training.
            runner: Runs the batches.
            callbacks: The callbacks; they are called around each batch, each epoch and the loop.
            limit: The largest number of batches to run; None sets no limit.
        """
        self._model = model
        self._runner = runner
        self._callbacks: Any = callbacks
        self._spending = runner.progress.wall_time.spending
        self._names = metric_names_of(runner.metrics)
        #: The losses of a pass, each times its weight, and these weights, summed up.
        self._loss_sum = self._weights = 0.0
        self.left = limit
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
            position: The position in the data, from which training continues; it advances.
            saver: Saves after steps and epochs; None saves nothing.
            epochs: The number of epochs, including those before the position.
            accumulate: The number of batches whose gradients are added up for one step.
            evaluation: Yields the batches to evaluate at the end of epochs; None evaluates none.
            eval_freq: Epochs from one evaluation to the next.

        Returns:
            By name (``"loss"`` and metrics), a number for each epoch that this call trained.
        """
        logs: Logs = {}
        history: defaultdict[str, list[float]] = defaultdict(list)
        self._call_callbacks("on_begin", "train")
        if position.step == 0:
            position.restore_callbacks()
        while position.epoch < epochs and self.left != 0 and not position.stopped:
            epoch = position.epoch
            self._call_callbacks("on_epoch_begin", epoch, {"step": position.step})
            position.restore_callbacks()
            logs = self._run_epoch(source, position, saver, accumulate)
            self._add_to_history(history, {**logs, "loss": self._mean_loss()}, "")
            complete = self.left != 0 or position.step == source.steps
            if not complete and saver is not None:
                # Before callbacks step a rate: a resumed training ends this epoch.
                saver.save_unfinished_epoch()
            self._call_callbacks("on_epoch_end", epoch, logs)
            evaluated: Logs = {}
            if evaluation is not None and epoch % eval_freq == 0:
                evaluated = self._evaluate_epoch(evaluation, position)
                self._runner.progress.note(self._add_to_history(history, evaluated, "eval_"))
            position.stopped = self._runner.any_rank(self._model.stop_training)
            if complete:
                position.next_epoch()
                if saver is not None:
                    saver.after_epoch(epoch, evaluated)
        self._call_callbacks("on_end", "train", logs)
        return dict(history)

    def _add_to_history(self, history: History, logs: Logs, prefix: str) -> dict[str, float]:
        """Appends the loss and the metrics in the logs to the history; returns them.

        Args:
            history: The numbers of all epochs, by name.
            logs: The logs of an epoch or an evaluation.
            prefix: The beginning of the names in the history.
        """
        figures = {prefix + name: number for name, number in self._numbers_in(logs).items()}
        for name, number in figures.items():
            history[name].append(number)
        return figures

    def _numbers_in(self, logs: Logs) -> dict[str, float]:
        """Returns the loss and the metrics in the logs as numbers, by name.

        In logs, the loss is a list with one number, as in ``paddle.Model``.
        """
        values = {name: logs.get(name) for name in ("loss", *self._names)}
        return {
            name: float(value[0] if isinstance(value, list) else value)
            for name, value in values.items()
            if value is not None
        }

    def _run_epoch(
        self,
        source: BatchSource,
        position: Position,
        saver: PipelineCheckpoint | None,
        accumulate: int,
    ) -> Logs:
        """Trains on the rest of an epoch for :meth:`train`; returns the logs of the epoch."""
        self._model.mode = "train"
        self._loss_sum = self._weights = 0.0
        pending: list[tuple[int, Rows]] = []
        if position.step:
            self.logs.update(position.logs)

        def train() -> None:
            """Trains on the pending batches, and saves the step."""
            position.step += len(pending)
            position.taken += len(pending)
            self._train_on(pending)
            names = ("loss", "step", "batch_size", *self._names)
            position.logs = {name: self.logs[name] for name in names}
            if saver is not None:
                saver.after_step()

        for step, rows in self._numbered_batches(source, position.step):
            self._call_callbacks("on_batch_begin", "train", step, self.logs)
            # Copies, since a loader may fill the same tensors again for the next batch.
            pending.append((step, rows.copy() if accumulate > 1 else rows))
            if len(pending) == accumulate:
                train()
        last = position.step + len(pending) == source.steps
        if pending and (self.left != 0 or last):
            train()
        if self.left == 0:
            position.save_metric_states()
        if pending:
            # Too few batches for a step, as in paddle.Model: a resumed training repeats them.
            self._train_on(pending, step=False)
        return self._reset_metrics()

    def evaluate(self, source: BatchSource) -> Logs:
        """Evaluates all batches; returns the mean loss of all rows, and the metrics."""
        self._model.mode, limit = "eval", self.left
        steps = source.steps if limit is None else min(limit, source.steps or limit)
        self._loss_sum = self._weights = 0.0
        # A checkpoint, or an evaluation that failed, leaves counts in the metrics.
        self._reset_metrics()
        self._call_callbacks(
            "on_begin", "eval", {"steps": steps, "metrics": self._model.metric_names}
        )
        for step, rows in self._numbered_batches(source):
            self._call_callbacks("on_batch_begin", "eval", step, self.logs)
            loss, weight = self._runner.evaluate(rows)
            self._report_batch("eval", step, rows, loss if self._runner.has_loss else None, weight)
        logs = self._reset_metrics()
        mean = self._mean_loss()
        if mean is not None:
            logs["loss"] = [mean]
        self._call_callbacks("on_end", "eval", logs)
        return logs

    def predict(self, source: BatchSource) -> list[list[np.ndarray]]:
        """Runs the model on all batches; returns the outputs of each batch."""
        self._model.mode = "test"
        self._call_callbacks("on_begin", "predict", {"steps": source.steps})
        outputs = []
        for step, rows in self._numbered_batches(source):
            self._call_callbacks("on_batch_begin", "predict", step, self.logs)
            outputs.append(self._runner.predict(rows))
            self.logs.update(step=step, batch_size=rows.everywhere)
            self._call_callbacks("on_batch_end", "predict", step, self.logs)
        self._call_callbacks("on_end", "predict", self.logs)
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

    def _call_callbacks(self, hook: str, *arguments: Any) -> None:
        """Calls the method ``hook`` of Paddle's list of callbacks, and measures its time."""
        with self._spending("callbacks"):
            getattr(self._callbacks, hook)(*arguments)

    def _numbered_batches(self, source: BatchSource, taken: int = 0) -> Iterator[tuple[int, Rows]]:
        """Yields the number and the rows of each batch, until the source ends or ``left`` is 0.

        Args:
            source: The batches.
            taken: The number of batches that were trained before; the first number.
        """
        batches = enumerate(source.batches(taken), taken)
        while self.left != 0:
            with self._spending("data"):
                batch = next(batches, None)
            if batch is None:
                return
            if self.left is not None:
                self.left -= 1
            yield batch

    def _train_on(self, pending: list[tuple[int, Rows]], step: bool = True) -> None:
        """Trains on the pending batches with one step, reports each batch, and drops them.

        Args:
            pending: The numbers and the rows of the batches.
            step: Whether the optimizer steps; if not, the gradients stay on the parameters.
        """
        losses = self._runner.train([rows for _, rows in pending], step)
        for loss, (number, rows) in zip(losses, pending):
            self._runner.trained += step
            self._report_batch("train", number, rows, loss)
        pending.clear()

    def _report_batch(
        self, mode: str, step: int, rows: Rows, loss: float | None, weight: float | None = None
    ) -> None:
        """Updates the logs for a batch, calls the callbacks, and reports the numbers to the job.

        Args:
            mode: "train" or "eval".
            step: The number of the batch.
            rows: The batch.
            loss: The loss of the batch; None if there is no loss function.
            weight: The weight of the loss in the mean; None takes the number of rows.
        """
        if loss is not None:
            self.logs["loss"] = [loss]
            weight = rows.everywhere if weight is None else weight
            self._loss_sum += weight * loss
            self._weights += weight
        if self._names:
            self.logs.update(zip(self._names, metric_values_of(self._runner.metrics)))
        self.logs.update(step=step, batch_size=rows.everywhere)
        self._call_callbacks("on_batch_end", mode, step, self.logs)
        if mode == "train":
            # ThroughputMonitor sets it, if it knows the tokens of a row.
            tokens = self.logs.get("tokens_per_second")
            rate = {} if tokens is None else {"tokens_per_second": tokens}
            self._runner.progress.note({**self._numbers_in(self.logs), **rate})

    def _mean_loss(self) -> float | None:
        """Returns the weighted mean of the batches' losses; None if no batch had a loss."""
        return self._loss_sum / self._weights if self._weights else None

    def _reset_metrics(self) -> Logs:
        """Resets the metrics, and returns the logs."""
        for metric in self._runner.metrics:
            metric.reset()
        return self.logs
