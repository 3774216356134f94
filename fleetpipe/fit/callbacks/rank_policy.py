"""Which ranks run a callback, and what Paddle's own need to run on all of them.

A callback runs on every rank, with the same losses and metrics, unless it says where: a class or an
object with ``on_rank = "first"`` runs on the first rank of the job, ``"loss"`` on the rank that
owns the last stage of the first replica. Such a callback must call nothing collective.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from fleetpipe.aliases import Nest
from fleetpipe.errors import ConfigError
from fleetpipe.fit.arguments import require_callback
from fleetpipe.paddle_api import paddle
from fleetpipe.representation import shows

_PLACES = ("all", "first", "loss")


@shows("on_rank", every="_every", folder="_folder")
class Callback(paddle.callbacks.Callback):
    """Paddle's, of a :class:`fleetpipe.Model`."""

    model: Any


class ModelCheckpoint(paddle.callbacks.ModelCheckpoint):
    """Paddle's, on every rank: to save is collective, and rank 0 alone would wait for ever."""

    def _is_save(self) -> bool:
        return bool(self.model and self.save_dir)


class LRScheduler(paddle.callbacks.LRScheduler):
    """Paddle's, where callbacks hear of several batches after the one step that they make.

    Between the batches of a step it goes on when the next of them begins: the optimizer steps with
    the learning rate that it has under Paddle, where each batch ends before the next begins.
    """

    def __init__(self, by_step: bool = True, by_epoch: bool = False) -> None:
        super().__init__(by_step, by_epoch)
        self._begun = 0

    def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
        """Goes on for the batch before, where that is one of the same step."""
        if self._begun:
            super().on_train_batch_end(step, logs)
        self._begun += 1

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        """Goes on for the last batch of a step."""
        self._begun -= 1
        if not self._begun:
            super().on_train_batch_end(step, logs)


class Elsewhere(Callback):
    """Stands for a callback on the ranks that do not run it."""


def chosen(callbacks: Nest, is_place: Callable[[str], bool]) -> list[Any]:
    """Returns what this rank runs in the place of each of the user's callbacks.

    Args:
        callbacks: What the user gave: None, one, or several.
        is_place: Whether this rank is ``"first"`` or ``"loss"``.

    Raises:
        ConfigError: One is no callback, or its ``on_rank`` is none of the places.
    """
    listed = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks or []]
    return [_here(callback, is_place) for callback in listed if callback]


def _here(callback: Any, is_place: Callable[[str], bool]) -> Any:
    require_callback(callback)
    place = getattr(callback, "on_rank", "all")
    if place not in _PLACES:
        raise ConfigError(
            f"a callback's on_rank is {', '.join(map(repr, _PLACES))}",
            got=f"{type(callback).__name__}.on_rank = {place!r}",
            fix="leave it out: callbacks run on every rank",
        )
    if place != "all" and not is_place(place):
        return Elsewhere()
    stock = paddle.callbacks.ModelCheckpoint
    if isinstance(callback, stock) and not isinstance(callback, ModelCheckpoint):
        return ModelCheckpoint(callback.save_freq, callback.save_dir)
    if type(callback) is paddle.callbacks.LRScheduler:
        return LRScheduler(callback.by_step, callback.by_epoch)
    return callback


def say(text: str) -> None:
    """Writes a line to standard output at once: of a log file it can be read while training.

    A bar that stands in the terminal is moved below it.
    """
    tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()
