"""Reads a checkpoint into the plain model of one process, in which no job is needed."""

from __future__ import annotations

import os
from pathlib import Path

from fleetpipe.checkpoint.contents.objects import Objects
from fleetpipe.checkpoint.files.run_folder import LATEST, Retention
from fleetpipe.checkpoint.ranks import Ranks
from fleetpipe.checkpoint.restoring import restore
from fleetpipe.mesh.groups import SoleGroup
from fleetpipe.paddle_types import Layer, Optimizer


def load_single(
    model: Layer,
    folder: str | os.PathLike[str],
    step: int | str = LATEST,
    optimizer: Optimizer | None = None,
) -> int:
    """Loads what any job has saved into a model of one process. Not collective.

    Args:
        model: Any Layer, whole in this process: with the names of the model that was saved, as
            ``nn.Sequential`` of the list of layers has them, or with the same parameters and
            buffers in the same order.
        folder: The folder of the run.
        step: A number, or ``"latest"``.
        optimizer: An optimizer of Paddle's on the model's parameters, which gets its state too.

    Returns:
        The step.

    Raises:
        CheckpointError: There is no such step, it is damaged, or it does not fit; nothing was
            changed.
    """
    objects = Objects(model, optimizer, random=False)
    return restore(Ranks(SoleGroup()), Retention(Path(folder)), step, objects).step
