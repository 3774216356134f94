"""``BaseHook``: the events of a ``Trainer``, for hooks of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from fleetpipe.aliases import Nest, Tensor
from fleetpipe.compat.colossalai.trainer.hooks.metrics import Metric


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
        """Takes the priority."""
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
