"""The optimizer of a pipeline: the user's own, refused where it could not be right."""

from __future__ import annotations

from typing import Any

from fleetpipe._paddle import paddle
from fleetpipe.dygraph._paddle import gradient_clip
from fleetpipe.errors import ConfigError


class PipelineOptimizer:
    """Steps the user's optimizer once for each batch; every other attribute is the optimizer's.

    Each rank has an optimizer over the parameters of its own stages. A process that plays all
    ranks has one over all of them.
    """

    def __init__(self, optimizer: Any) -> None:
        """Wraps any Paddle optimizer built on ``model.parameters()``."""
        self.wrapped = optimizer

    def step(self) -> None:
        """Updates this process's parameters."""
        self.wrapped.step()

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the wrapped optimizer."""
        if name == "wrapped":
            raise AttributeError(name)
        return getattr(self.wrapped, name)


def refuse_partial_norm(optimizer: Any) -> None:
    """Refuses an optimizer that clips by a norm of which each rank holds only a part.

    Raises:
        ConfigError: The optimizer has a ``ClipGradByGlobalNorm``.
    """
    clip = gradient_clip(optimizer)
    if isinstance(clip, paddle.nn.ClipGradByGlobalNorm):
        raise ConfigError(
            f"this version does not run {type(clip).__name__} over several processes",
            cause="the norm of all gradients is the norm of all stages together",
            fix="use ClipGradByNorm or ClipGradByValue, or one process for all stages",
        )
