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

from fleetpipe._paddle import paddle
from fleetpipe.aliases import Nest
from fleetpipe.errors import ConfigError

_PLACES = ("all", "first", "loss")


class Callback(paddle.callbacks.Callback):
    """Paddle's, of a :class:`fleetpipe.Model`."""

    model: Any


class ModelCheckpoint(paddle.callbacks.ModelCheckpoint):
    """Paddle's, on every rank: to save is collective, and rank 0 alone would wait for ever."""

    def _is_save(self) -> bool:
        return bool(self.model and self.save_dir)


class Elsewhere(Callback):
    """Stands for a callback on the ranks that do not run it."""


def chosen(callbacks: Nest, is_place: Callable[[str], bool]) -> list[Any]:
    """Returns what this rank runs in the place of each of the user's callbacks.

    Args:
        callbacks: What the user gave: None, one, or several.
        is_place: Whether this rank is ``"first"`` or ``"loss"``.

    Raises:
        ConfigError: The ``on_rank`` of a callback is none of the places.
    """
    given = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks or []]
    return [_here(callback, is_place) for callback in given if callback]


def _here(callback: Any, is_place: Callable[[str], bool]) -> Any:
    place = getattr(callback, "on_rank", "all")
    if place not in _PLACES:
        raise ConfigError(
            f"a callback's on_rank is {', '.join(map(repr, _PLACES))}",
            got=f"{type(callback).__name__}.on_rank = {place!r}",
            fix="leave it out: callbacks run on every rank",
        )
    if place != "all" and not is_place(place):
        return Elsewhere()
    theirs = paddle.callbacks.ModelCheckpoint
    if isinstance(callback, theirs) and not isinstance(callback, ModelCheckpoint):
        return ModelCheckpoint(callback.save_freq, callback.save_dir)
    return callback


def say(text: str) -> None:
    """Writes a line to standard output at once: of a log file it can be read while training.

    A bar that stands in the terminal is moved below it.
    """
    tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()
