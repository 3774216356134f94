"""The hooks that show what the others count: a line for each epoch, and the progress."""

from __future__ import annotations

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.compat.colossalai.logging import DistributedLogger
from fleetpipe.compat.colossalai.trainer.hooks.base import BaseHook, Trainer


class LogMetricByEpochHook(BaseHook):
    """Logs a line for each epoch and each evaluation, on the owner of the last stage.

    ``[Epoch 0 / Train]: Loss = 2.0123 | LR = 0.001``.
    """

    def __init__(self, logger: DistributedLogger, interval: int = 1, priority: int = 10) -> None:
        """Takes where to log.

        Args:
            logger: Of ``get_dist_logger``.
            interval: Epochs from one line to the next.
            priority: See :class:`BaseHook`.
        """
        super().__init__(priority)
        self.logger = logger
        self._interval = interval

    def after_train_epoch(self, trainer: Trainer) -> None:
        """Logs the line of the training."""
        self._log(trainer, "train")

    def after_test_epoch(self, trainer: Trainer) -> None:
        """Logs the line of the evaluation."""
        self._log(trainer, "test")

    def _log(self, trainer: Trainer, mode: str) -> None:
        if trainer.cur_epoch % self._interval == 0 and trainer.is_rank_to_log:
            values = trainer.metrics(mode).items()
            shown = (f"{name} = {metric.get_accumulated_value():.5g}" for name, metric in values)
            head = f"[Epoch {trainer.cur_epoch} / {mode.title()}]"
            self.logger.info(f"{head}: {' | '.join(shown)}")


class LogMetricByStepHook(BaseHook):
    """Has the progress show what the last batch came to: the trainer's ``step_metrics``."""

    def __init__(self, priority: int = 10) -> None:
        """Takes the priority."""
        super().__init__(priority)

    def after_train_iter(self, trainer: Trainer, output: Nest, label: Nest, loss: Tensor) -> None:
        """Notes the values of a batch."""
        self._note(trainer, "train")

    def after_test_iter(self, trainer: Trainer, output: Nest, label: Nest, loss: Tensor) -> None:
        """Notes the values of a batch of an evaluation."""
        self._note(trainer, "test")

    def _note(self, trainer: Trainer, mode: str) -> None:
        trainer.states["step_metrics"] = {
            name.lower(): f"{metric.get_last_step_value():.5g}"
            for name, metric in trainer.metrics(mode).items()
        }
