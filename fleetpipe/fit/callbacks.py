"""Paddle's callbacks on ranks: which of them must run elsewhere than where Paddle runs them."""

from __future__ import annotations

from fleetpipe._paddle import paddle
from fleetpipe.aliases import Nest


class ModelCheckpoint(paddle.callbacks.ModelCheckpoint):
    """Paddle's, on every rank: to save is collective, and rank 0 alone would wait for ever."""

    def _is_save(self) -> bool:
        return bool(self.model and self.save_dir)


def on_ranks(callbacks: Nest, save_freq: int, save_dir: str | None) -> list[Nest]:
    """Returns the callbacks to run on every rank.

    Args:
        callbacks: What the user gave: None, one, or several.
        save_freq: For a ``ModelCheckpoint``, if the user gave none.
        save_dir: As ``save_freq``.
    """
    given = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks or []]
    given = [callback for callback in given if callback]
    theirs = paddle.callbacks.ModelCheckpoint
    found = [
        ModelCheckpoint(callback.save_freq, callback.save_dir)
        if isinstance(callback, theirs) and not isinstance(callback, ModelCheckpoint)
        else callback
        for callback in given
    ]
    if not any(isinstance(callback, theirs) for callback in found):
        found.append(ModelCheckpoint(save_freq, save_dir))
    return found
