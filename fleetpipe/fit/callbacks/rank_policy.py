"""Decides which ranks run a callback, and adapts Paddle's own callbacks to many ranks.

A callback runs on every rank, with the same losses and metrics, unless its attribute ``on_rank`` is
``"first"``, for the first rank of the job, or ``"loss"``, for the rank that owns the last stage of
the first replica. Such a callback must call nothing collective.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from fleetpipe.errors import ConfigError
from fleetpipe.fit.arguments import require_callback
from fleetpipe.paddle_api import paddle
from fleetpipe.representation import shows

#: The values of ``on_rank``.
_RANKS = ("all", "first", "loss")


@shows("on_rank", every="_every", folder="_folder")
class Callback(paddle.callbacks.Callback):
    """Paddle's ``Callback`` with a ``fleetpipe.Model`` as its ``model``."""

    model: Any


class ModelCheckpoint(paddle.callbacks.ModelCheckpoint):
    """Paddle's ``ModelCheckpoint`` on every rank, because ``Model.save`` is collective."""

    def _is_save(self) -> bool:
        """Returns whether this rank saves; Paddle's method is true on the first rank only."""
        return bool(self.model and self.save_dir)


class LRScheduler(paddle.callbacks.LRScheduler):
    """Paddle's ``LRScheduler`` for steps that accumulate the gradients of several batches.

    Paddle's advances the learning rate at the end of each batch, so before the optimizer steps at
    the last batch of a step, the rate has advanced for the earlier ones. Here the batches of a step
    all end after the optimizer's step. To give the step the same rate as in Paddle, the rate
    advances for an earlier batch when the next one begins.
    """

    def __init__(self, by_step: bool = True, by_epoch: bool = False) -> None:
        super().__init__(by_step, by_epoch)
        #: How many batches have begun and not ended.
        self._open_batches = 0

    def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
        """Advances the rate for the batch before, if that belongs to the same step."""
        if self._open_batches:
            super().on_train_batch_end(step, logs)
        self._open_batches += 1

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        """Advances the rate for the last batch of a step."""
        self._open_batches -= 1
        if not self._open_batches:
            super().on_train_batch_end(step, logs)


class NoCallback(Callback):
    """Does nothing, in place of a callback that runs on another rank."""


def callback_of_rank(callback: Any, is_rank: Callable[[str], bool]) -> Any:
    """Returns the callback to run on this rank for one of the user's.

    Args:
        callback: The user's callback.
        is_rank: Returns whether this rank is the one that ``"first"`` or ``"loss"`` names.

    Raises:
        ConfigError: It is no callback, or its ``on_rank`` is neither ``"first"`` nor ``"loss"`` nor
            ``"all"``.
    """
    require_callback(callback)
    rank = getattr(callback, "on_rank", "all")
    if rank not in _RANKS:
        raise ConfigError(
            f"a callback's on_rank is {', '.join(map(repr, _RANKS))}",
            got=f"{type(callback).__name__}.on_rank = {rank!r}",
            fix="leave it out: callbacks run on every rank",
        )
    if rank != "all" and not is_rank(rank):
        return NoCallback()
    stock = paddle.callbacks.ModelCheckpoint
    if isinstance(callback, stock) and not isinstance(callback, ModelCheckpoint):
        return ModelCheckpoint(callback.save_freq, callback.save_dir)
    if type(callback) is paddle.callbacks.LRScheduler:
        return LRScheduler(callback.by_step, callback.by_epoch)
    return callback


def say(text: str) -> None:
    """Writes a line to standard output and flushes it, so that a log file has it at once.

    A progress bar in the terminal moves below the line.
    """
    tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()
