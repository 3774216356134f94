"""``SaveCheckpointHook``: a training that goes on where it was interrupted."""

from __future__ import annotations

import os
from typing import Any

from fleetpipe.callbacks import PipelineCheckpoint
from fleetpipe.compat.colossalai.trainer.hooks.base import BaseHook


class SaveCheckpointHook(BaseHook):
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
        super().__init__(priority)
        self._callback = PipelineCheckpoint(
            checkpoint_dir,
            every_steps=interval if save_by_iter else None,
            every_epochs=None if save_by_iter else interval,
        )

    def callbacks(self) -> list[Any]:
        """Returns what saves."""
        return [self._callback]
