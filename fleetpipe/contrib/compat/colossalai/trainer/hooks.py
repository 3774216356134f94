"""``colossalai.trainer.hooks``: what a ``Trainer`` calls around batches and epochs.

A program's own hooks derive from ``BaseHook``. The other hooks measure figures, log them, step the
learning rate and save checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from fleetpipe.aliases import Nest, Scheduler, Tensor
from fleetpipe.callbacks import PipelineCheckpoint
from fleetpipe.contrib.compat.colossalai.logging import DistributedLogger
from fleetpipe.contrib.compat.colossalai.trainer.trainer import BaseHook, Trainer

__all__ = [
    "AccuracyHook",
    "BaseHook",
    "LRSchedulerHook",
    "LogMetricByEpochHook",
    "LossHook",
    "SaveCheckpointHook",
]


class Metric:
    """A quotient of two sums, such as a mean loss or an accuracy."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Sets the sums to 0, for a new epoch."""
        self._sum = self._count = 0.0

    def update(self, value: float, count: float = 1.0) -> None:
        """Adds a value to the dividend, and a number to the divisor."""
        self._sum += value
        self._count += count

    def get_accumulated_value(self) -> float:
        """Returns the value of the epoch so far; 0 before its first step."""
        return self._sum / self._count if self._count else 0.0

    def state_dict(self) -> dict[str, float]:
        """Returns the sums so far."""
        return {"sum": self._sum, "count": self._count}

    def set_state_dict(self, state: dict[str, float]) -> None:
        """Restores the sums in the middle of an epoch."""
        self._sum, self._count = state["sum"], state["count"]


class LossHook(BaseHook):
    """Measures the mean loss of each epoch and each evaluation."""

    def __init__(self, priority: int = 0) -> None:
        super().__init__(priority)
        self.train_loss, self.test_loss = Metric(), Metric()

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        """Adds the losses to the trainer's metrics."""
        trainer.add_metric("train", "Loss", self.train_loss)
        trainer.add_metric("test", "Loss", self.test_loss)

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


class AccuracyHook(BaseHook):
    """Measures the share of right outputs in an evaluation, over all replicas."""

    def __init__(self, accuracy_func: Callable[..., Any], priority: int = 0) -> None:
        """Sets the function that counts right rows.

        Args:
            accuracy_func: ``accuracy_func(output, label)`` returns how many rows are right.
            priority: See :class:`BaseHook`.
        """
        super().__init__(priority)
        self.accuracy_func = accuracy_func
        self.metric = Metric()

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        """Adds the accuracy to the trainer's metrics."""
        trainer.add_metric("test", "Accuracy", self.metric)

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


class LRSchedulerHook(BaseHook):
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
        self.metric = Metric()

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        """Adds the rate to the trainer's metrics."""
        self._measure()
        if self.store_lr_in_state:
            trainer.add_metric("train", "LR", self.metric)

    def after_train_iter(self, trainer: Trainer, output: Nest, label: Nest, loss: Tensor) -> None:
        """Steps the scheduler after a batch, unless it goes by epochs."""
        if not self.by_epoch:
            self.lr_scheduler.step()
            self._measure()

    def after_train_epoch(self, trainer: Trainer) -> None:
        """Steps the scheduler after an epoch, if it goes by epochs."""
        if self.by_epoch:
            self.lr_scheduler.step()
            self._measure()

    def _measure(self) -> None:
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
            values = trainer.states["metrics"][mode].items()
            shown = (f"{name} = {metric.get_accumulated_value():.5g}" for name, metric in values)
            head = f"[Epoch {trainer.cur_epoch} / {mode.title()}]"
            self.logger.info(f"{head}: {' | '.join(shown)}")


class SaveCheckpointHook(BaseHook):
    """Saves model, optimizer, random states and the position in the data, on all ranks together.

    A program with this hook goes on from the newest checkpoint of the folder, if there is one, even
    in the middle of an epoch. A :class:`fleetpipe.callbacks.PipelineCheckpoint` does the work.
    """

    def __init__(
        self,
        interval: int = 1,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        model: Any = None,
        save_by_iter: bool = False,
        priority: int = 10,
    ) -> None:
        """Sets how often and where to save.

        Args:
            interval: Epochs from one checkpoint to the next, or batches.
            checkpoint_dir: A folder that every rank sees; None for the folder of ``fleetpipe
                launch``, else ``checkpoints``.
            model: Accepted without effect: the engine's is saved.
            save_by_iter: Whether ``interval`` is in batches.
            priority: See :class:`BaseHook`.

        Raises:
            ConfigError: ``interval`` is below 1.
        """
        super().__init__(priority)
        steps, epochs = (interval, None) if save_by_iter else (None, interval)
        self.callback = PipelineCheckpoint(checkpoint_dir, every_steps=steps, every_epochs=epochs)
