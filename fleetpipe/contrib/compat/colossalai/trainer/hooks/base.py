"""``BaseHook``: the events of a ``Trainer``, for hooks of one's own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.callbacks import MetricsLogger, PipelineCheckpoint


class Trainer(Protocol):
    """A ``Trainer`` as hooks see it; its own class says what these are."""

    states: dict[str, Any]
    cur_epoch: int
    cur_step: int
    batch_size: int
    step_seconds: float

    @property
    def is_rank_to_log(self) -> bool:
        """Whether this process owns the last stage of the first replica."""

    def from_last_stage(self, value: Nest) -> list[Nest]:
        """Returns what the owners of the last stage pass. Collective."""

    def metrics(self, mode: str) -> Mapping[str, Metric]:
        """Returns what hooks count, by name."""


class BaseHook:
    """Does something at certain times; every hook runs on every rank.

    Attributes:
        priority: Hooks with a smaller one run first.
    """

    def __init__(self, priority: int) -> None:
        self.priority = priority

    def after_hook_is_attached(self, trainer: Trainer) -> None:
        """Called when a ``fit`` or an ``evaluate`` begins, before all else."""

    def before_train(self, trainer: Trainer) -> None:
        """Called before the first epoch."""

    def after_train(self, trainer: Trainer) -> None:
        """Called after the last."""

    def before_train_epoch(self, trainer: Trainer) -> None:
        """Called before an epoch."""

    def after_train_epoch(self, trainer: Trainer) -> None:
        """Called after an epoch, before its evaluation."""

    def before_train_iter(self, trainer: Trainer) -> None:
        """Called before a batch."""

    def after_train_iter(self, trainer: Trainer, output: Nest, label: Nest, loss: Tensor) -> None:
        """Called after a batch.

        Args:
            trainer: Who trains.
            output: Of the whole batch of this replica, on the owner of the last stage; None
                elsewhere.
            label: Its labels, likewise.
            loss: The mean of all replicas, on every rank; float32 [].
        """

    def before_test(self, trainer: Trainer) -> None:
        """Called before an evaluation."""

    def after_test(self, trainer: Trainer) -> None:
        """Called after it."""

    def before_test_epoch(self, trainer: Trainer) -> None:
        """Called after :meth:`before_test`."""

    def after_test_epoch(self, trainer: Trainer) -> None:
        """Called before :meth:`after_test`."""

    def before_test_iter(self, trainer: Trainer) -> None:
        """Called before a batch of an evaluation."""

    def after_test_iter(self, trainer: Trainer, output: Nest, label: Nest, loss: Tensor) -> None:
        """Called after one, as :meth:`after_train_iter`."""

    def callbacks(self) -> list[Any]:
        """Returns the callbacks of :mod:`fleetpipe.callbacks` that do the work of this hook."""
        return []

    def init_runner_states(self, trainer: Trainer, key: Any, val: Any) -> None:
        """Gives the trainer's ``states`` an entry, unless it is there."""
        trainer.states.setdefault(key, val)


class Metric:
    """A sum over another one: a mean loss, right rows among all, samples a second.

    Attributes:
        epoch_only: Whether the value of a step means little.
    """

    def __init__(self, epoch_only: bool) -> None:
        self.epoch_only = epoch_only
        self.reset()

    def reset(self) -> None:
        """Begins an epoch."""
        self._sum = self._count = self._last = 0.0

    def update(self, value: float, count: float = 1.0) -> None:
        """Counts a step.

        Args:
            value: Is added up.
            count: What it is divided by, added up too.
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
        """Returns what was counted so far."""
        return {"sum": self._sum, "count": self._count}

    def set_state_dict(self, state: dict[str, float]) -> None:
        """Continues in the middle of an epoch."""
        self._sum, self._count = state["sum"], state["count"]


class CallbackHook(BaseHook):
    """A hook that is a callback of :mod:`fleetpipe.callbacks`."""

    def __init__(self, priority: int, callback: Any) -> None:
        super().__init__(priority)
        self._callback = callback

    def callbacks(self) -> list[Any]:
        """Returns the callback."""
        return [self._callback]


class SaveCheckpointHook(CallbackHook):
    """Saves model, optimizer, random states and the place in the data, on all ranks together.

    A program with this hook goes on from the newest checkpoint of the folder, if there is one, in
    the middle of an epoch too; it is a :class:`fleetpipe.callbacks.PipelineCheckpoint`.
    """

    def __init__(
        self,
        interval: int = 1,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        model: Any = None,
        save_by_iter: bool = False,
        priority: int = 10,
    ) -> None:
        """Takes how often and where.

        Args:
            interval: Epochs from one checkpoint to the next, or batches.
            checkpoint_dir: A folder that every rank sees; None for that of ``fleetpipe launch``, or
                ``checkpoints``.
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
    """Writes what the other hooks count to TensorBoard's files; needs tensorboardX."""

    def __init__(
        self,
        log_dir: str | os.PathLike[str],
        ranks: Any = None,
        parallel_mode: Any = None,
        priority: int = 10,
    ) -> None:
        """Takes where to write.

        Args:
            log_dir: The folder.
            ranks: Accepted without effect: values are the same on every rank, and one writes.
            parallel_mode: Likewise.
            priority: See :class:`BaseHook`.

        Raises:
            ConfigError: tensorboardX is not installed.
        """
        super().__init__(priority, MetricsLogger(os.fspath(log_dir), formats=["tensorboard"]))
