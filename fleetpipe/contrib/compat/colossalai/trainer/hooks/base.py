"""``BaseHook``: the events of a ``Trainer``, for hooks that users write."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.callbacks import MetricsLogger, PipelineCheckpoint


class Trainer(Protocol):
    """The attributes of a ``Trainer`` that hooks use; its class describes them."""

    states: dict[str, Any]
    cur_epoch: int
    cur_step: int
    batch_size: int
    step_seconds: float

    @property
    def is_rank_to_log(self) -> bool:
        """Whether this process owns the last stage of the first replica."""

    def from_last_stage(self, value: Nest) -> list[Nest]:
        """Returns the values that the owners of the last stage pass. Collective."""

    def metrics(self, mode: str) -> Mapping[str, Metric]:
        """Returns the metrics of the hooks by name."""


class BaseHook:
    """Acts at events of a ``Trainer``; every hook runs on every rank.

    Attributes:
        priority: Hooks with a smaller number run first.
    """

    def __init__(self, priority: int) -> None:
        self.priority = priority

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        """Called when a ``fit`` or an ``evaluate`` begins, before all else."""

    def before_train(self, trainer: Trainer) -> None:
        """Called before the first epoch."""

    def after_train(self, trainer: Trainer) -> None:
        """Called after the last epoch."""

    def before_train_epoch(self, trainer: Trainer) -> None:
        """Called before an epoch."""

    def after_train_epoch(self, trainer: Trainer) -> None:
        """Called after an epoch, before its evaluation."""

    def before_train_iter(self, trainer: Trainer) -> None:
        """Called before a batch."""

    def after_train_iter(self, trainer: Trainer, output: Nest, label: Nest, loss: Tensor) -> None:
        """Called after a batch.

        Args:
            trainer: The trainer.
            output: The output of this replica's whole batch, on the owner of the last stage; None
                elsewhere.
            label: The labels of the batch, likewise.
            loss: The mean loss of all replicas, on every rank; float32 [].
        """

    def before_test(self, trainer: Trainer) -> None:
        """Called before an evaluation."""

    def after_test(self, trainer: Trainer) -> None:
        """Called after an evaluation."""

    def before_test_epoch(self, trainer: Trainer) -> None:
        """Called after :meth:`before_test`."""

    def after_test_epoch(self, trainer: Trainer) -> None:
        """Called before :meth:`after_test`."""

    def before_test_iter(self, trainer: Trainer) -> None:
        """Called before a batch of an evaluation."""

    def after_test_iter(self, trainer: Trainer, output: Nest, label: Nest, loss: Tensor) -> None:
        """Called after a batch of an evaluation, as :meth:`after_train_iter`."""

    def callbacks(self) -> list[Any]:
        """Returns the callbacks of :mod:`fleetpipe.callbacks` that do the work of this hook."""
        return []

    def init_runner_states(self, trainer: Trainer, key: Any, val: Any) -> None:
        """Adds an entry to the trainer's ``states``, unless it exists."""
        trainer.states.setdefault(key, val)


class Metric:
    """A quotient of two sums, such as a mean loss, an accuracy, or samples per second.

    Attributes:
        epoch_only: Whether only the value of an epoch is meaningful.
    """

    def __init__(self, epoch_only: bool) -> None:
        self.epoch_only = epoch_only
        self.reset()

    def reset(self) -> None:
        """Sets the sums to 0, for a new epoch."""
        self._sum = self._count = self._last = 0.0

    def update(self, value: float, count: float = 1.0) -> None:
        """Adds the values of a step.

        Args:
            value: Added to the dividend.
            count: Added to the divisor.
        """
        self._sum += value
        self._count += count
        self._last = value / count if count else 0.0

    def get_last_step_value(self) -> float:
        """Returns the value of the last step; 0 before the first."""
        return self._last

    def get_accumulated_value(self) -> float:
        """Returns the value of the epoch so far; 0 before its first step."""
        return self._sum / self._count if self._count else 0.0

    def state_dict(self) -> dict[str, float]:
        """Returns the sums so far."""
        return {"sum": self._sum, "count": self._count}

    def set_state_dict(self, state: dict[str, float]) -> None:
        """Restores the sums in the middle of an epoch."""
        self._sum, self._count = state["sum"], state["count"]


class CallbackHook(BaseHook):
    """A hook whose work is done by a callback of :mod:`fleetpipe.callbacks`."""

    def __init__(self, priority: int, callback: Any) -> None:
        super().__init__(priority)
        self._callback = callback

    def callbacks(self) -> list[Any]:
        """Returns the callback."""
        return [self._callback]


class SaveCheckpointHook(CallbackHook):
    """Saves model, optimizer, random states and the place in the data, on all ranks together.

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
        steps, epochs = (interval, None) if save_by_iter else (None, interval)
        callback = PipelineCheckpoint(checkpoint_dir, every_steps=steps, every_epochs=epochs)
        super().__init__(priority, callback)


class TensorboardHook(CallbackHook):
    """Writes the figures of the other hooks to TensorBoard's files; needs tensorboardX."""

    def __init__(
        self,
        log_dir: str | os.PathLike[str],
        ranks: Any = None,
        parallel_mode: Any = None,
        priority: int = 10,
    ) -> None:
        """Sets the folder to write to.

        Args:
            log_dir: The folder.
            ranks: Accepted without effect: values are the same on every rank, and one writes.
            parallel_mode: Accepted without effect.
            priority: See :class:`BaseHook`.

        Raises:
            ConfigError: tensorboardX is not installed.
        """
        super().__init__(priority, MetricsLogger(os.fspath(log_dir), formats=["tensorboard"]))
