"""The hooks that a callback of fleetpipe's does the work of: checkpoints, TensorBoard's files."""

from __future__ import annotations

import os
from typing import Any

from fleetpipe.callbacks import MetricsLogger, PipelineCheckpoint
from fleetpipe.compat.colossalai.trainer.hooks.base import BaseHook


class CallbackHook(BaseHook):
    """A hook that is a callback of :mod:`fleetpipe.callbacks`."""

    def __init__(self, priority: int, callback: Any) -> None:
        """Takes the callback."""
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
