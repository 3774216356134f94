"""Hooks that measure loss, accuracy, throughput and learning rate, and hooks that log them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fleetpipe.aliases import Nest, Scheduler, Tensor
from fleetpipe.contrib.compat.colossalai.logging import DistributedLogger
from fleetpipe.contrib.compat.colossalai.trainer.hooks.base import BaseHook, Metric, Trainer


class MetricHook(BaseHook):
    """Puts metrics into the trainer's ``states["metrics"]``, for the hooks that log them."""

    def _show(self, trainer: Trainer, mode: str, name: str, metric: Metric) -> None:
        self.init_runner_states(trainer, "metrics", {"train": {}, "test": {}})
        trainer.states["metrics"][mode][name] = metric


class LossHook(MetricHook):
    """Measures the mean loss of each epoch and each evaluation."""

    def __init__(self, priority: int = 0) -> None:
        super().__init__(priority)

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        """Adds the losses to the trainer's metrics."""
        self.train_loss, self.test_loss = Metric(False), Metric(True)
        self._show(trainer, "train", "Loss", self.train_loss)
        self._show(trainer, "test", "Loss", self.test_loss)

    def before_train_epoch(self, trainer: Trainer) -> None:
        """Resets the loss of the training."""
        self.train_loss.reset()

    def after_train_iter(self, trainer: Trainer, output: Nest, label: Nest, loss: Tensor) -> None:
        """Adds the loss of a batch."""
        self.train_loss.update(float(loss))

    def before_test_epoch(self, trainer: Trainer) -> None:
        """Resets the loss of the evaluation."""
        self.test_loss.reset()

    def after_test_iter(self, trainer: Trainer, output: Nest, label: Nest, loss: Tensor) -> None:
        """Adds the loss of a batch of the evaluation."""
        self.test_loss.update(float(loss))

    def state_dict(self) -> dict[str, float]:
        """Returns the losses of the epoch so far."""
        return self.train_loss.state_dict()

    def set_state_dict(self, state: dict[str, float]) -> None:
        """Restores the losses in the middle of an epoch."""
        self.train_loss.set_state_dict(state)


class AccuracyHook(MetricHook):
    """Measures the share of right outputs in an evaluation, over all replicas."""

    def __init__(self, accuracy_func: Callable[..., Any], priority: int = 0) -> None:
        """Sets the function that counts right rows.

        Args:
            accuracy_func: ``accuracy_func(output, label)`` returns how many rows are right.
            priority: See :class:`BaseHook`.
        """
        super().__init__(priority)
        self.accuracy_func = accuracy_func

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        """Adds the accuracy to the trainer's metrics."""
        self.metric = Metric(True)
        self._show(trainer, "test", "Accuracy", self.metric)

    def before_test(self, trainer: Trainer) -> None:
        """Resets the accuracy."""
        self.metric.reset()

    def after_test_iter(self, trainer: Trainer, output: Nest, label: Nest, loss: Tensor) -> None:
        """Adds the right rows of a batch. Collective over the job."""
        counts = None
        if output is not None:
            first = output[0] if isinstance(output, (list, tuple)) else output
            counts = [float(self.accuracy_func(first, label)), first.shape[0]]
        rights, rows = zip(*trainer.from_last_stage(counts))
        self.metric.update(sum(rights), sum(rows))


class ThroughputHook(MetricHook):
    """Measures the samples per second of all replicas."""

    def __init__(self, ignored_steps: int = 0, priority: int = 10) -> None:
        """Sets how many of the first steps do not count.

        Args:
            ignored_steps: The number of these steps.
            priority: See :class:`BaseHook`.
        """
        super().__init__(priority)
        self._ignored = ignored_steps

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        """Adds the throughput to the trainer's metrics."""
        self._steps = 0
        self.metric = Metric(True)
        self._show(trainer, "train", "Throughput", self.metric)
        self._show(trainer, "test", "Throughput", self.metric)

    def before_train_epoch(self, trainer: Trainer) -> None:
        """Resets the throughput."""
        self.metric.reset()

    def before_test(self, trainer: Trainer) -> None:
        """Resets the throughput."""
        self.metric.reset()

    def after_train_iter(self, trainer: Trainer, output: Nest, label: Nest, loss: Tensor) -> None:
        """Adds the samples and seconds of a batch."""
        self._steps += 1
        if self._steps > self._ignored:
            self.metric.update(trainer.batch_size, trainer.step_seconds)

    def after_test_iter(self, trainer: Trainer, output: Nest, label: Nest, loss: Tensor) -> None:
        """Adds the samples and seconds of a batch of an evaluation."""
        self.metric.update(trainer.batch_size, trainer.step_seconds)


class LRSchedulerHook(MetricHook):
    """Steps a scheduler of the learning rate, and makes the rate a metric."""

    def __init__(
        self,
        lr_scheduler: Scheduler,
        by_epoch: bool,
        store_lr_in_state: bool = True,
        priority: int = 1,
    ) -> None:
        """Takes the scheduler.

        Args:
            lr_scheduler: The scheduler of Paddle's that the optimizer has.
            by_epoch: Whether to step it after each epoch, else after each batch.
            store_lr_in_state: Whether the rate is a metric.
            priority: See :class:`BaseHook`.
        """
        super().__init__(priority)
        self.lr_scheduler = lr_scheduler
        self.by_epoch = by_epoch
        self.store_lr_in_state = store_lr_in_state

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        """Adds the rate to the trainer's metrics."""
        self.metric = Metric(self.by_epoch)
        self.metric.update(self.lr_scheduler.last_lr)
        if self.store_lr_in_state:
            self._show(trainer, "train", "LR", self.metric)

    def after_train_iter(self, trainer: Trainer, output: Nest, label: Nest, loss: Tensor) -> None:
        """Steps the scheduler after a batch, unless it goes by epochs."""
        if not self.by_epoch:
            self._step()

    def after_train_epoch(self, trainer: Trainer) -> None:
        """Steps the scheduler after an epoch, if it goes by epochs."""
        if self.by_epoch:
            self._step()

    def _step(self) -> None:
        self.lr_scheduler.step()
        self.metric.reset()
        self.metric.update(self.lr_scheduler.last_lr)


class LogMetricByEpochHook(BaseHook):
    """Logs a line for each epoch and each evaluation, on the owner of the last stage.

    ``[Epoch 0 / Train]: Loss = 2.0123 | LR = 0.001``.
    """

    def __init__(self, logger: DistributedLogger, interval: int = 1, priority: int = 10) -> None:
        """Sets the logger and how often to log.

        Args:
            logger: A logger of ``get_dist_logger``.
            interval: Epochs from one line to the next.
            priority: See :class:`BaseHook`.
        """
        super().__init__(priority)
        self.logger = logger
        self._interval = interval

    def after_train_epoch(self, trainer: Trainer) -> None:
        """Logs the line for the training of an epoch."""
        self._log(trainer, "train")

    def after_test_epoch(self, trainer: Trainer) -> None:
        """Logs the line for an evaluation."""
        self._log(trainer, "test")

    def _log(self, trainer: Trainer, mode: str) -> None:
        if trainer.cur_epoch % self._interval == 0 and trainer.is_rank_to_log:
            values = trainer.metrics(mode).items()
            shown = (f"{name} = {metric.get_accumulated_value():.5g}" for name, metric in values)
            head = f"[Epoch {trainer.cur_epoch} / {mode.title()}]"
            self.logger.info(f"{head}: {' | '.join(shown)}")


class LogMetricByStepHook(BaseHook):
    """Puts the metrics of the last batch into ``step_metrics``, which the progress shows."""

    def __init__(self, priority: int = 10) -> None:
        super().__init__(priority)

    def after_train_iter(self, trainer: Trainer, output: Nest, label: Nest, loss: Tensor) -> None:
        """Notes the metrics of a batch."""
        self._note(trainer, "train")

    def after_test_iter(self, trainer: Trainer, output: Nest, label: Nest, loss: Tensor) -> None:
        """Notes the metrics of a batch of an evaluation."""
        self._note(trainer, "test")

    def _note(self, trainer: Trainer, mode: str) -> None:
        trainer.states["step_metrics"] = {
            name.lower(): f"{metric.get_last_step_value():.5g}"
            for name, metric in trainer.metrics(mode).items()
        }
