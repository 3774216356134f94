"""Clips that a script defines: on several ranks they see the gradients of one rank alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from fleetpipe.aliases import Clip, Tensor
from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.optimizer import clip_methods


def is_own(clip: Clip) -> bool:
    """Whether a clip is defined outside Paddle and fleetpipe, at least in part."""
    if not isinstance(clip, paddle.nn.clip.ClipGradBase):
        return False
    modules = (method.__module__.partition(".")[0] for method in clip_methods(clip))
    return any(module not in ("paddle", "fleetpipe") for module in modules)


def require_by_gradient(clip: Clip, parameters: Sequence[Tensor]) -> None:
    """Makes sure that a clip's effect on a gradient does not depend on other gradients.

    Raises:
        ConfigError: It does.
    """
    pairs = [(p, paddle.full_like(p, 1e4)) for p in parameters if not p.stop_gradient]

    def clip_some(*some: tuple[Tensor, Tensor]) -> list[bytes]:
        results = copy.deepcopy(clip)([(p, gradient.clone()) for p, gradient in some])
        return [gradient.numpy().tobytes() for _, gradient in results]

    if clip_some(*pairs) != [one for pair in pairs for one in clip_some(pair)]:
        raise ConfigError(
            "a clip of the script's own computes with the gradients of one rank, not of all",
            got=type(clip).__name__,
            fix="clip with paddle.nn.ClipGradByGlobalNorm itself, or each gradient by itself",
        )
