"""Clips each gradient by its norm, where a member has only a shard of it: ``ClipGradByNorm``.

Fleet takes the norm of each shard for that of the whole gradient, and so clips less.
"""

from __future__ import annotations

from fleetpipe.aliases import Clip, Tensor
from fleetpipe.dygraph.tensor_parallel.groups import members_of, model_parallel_group, total
from fleetpipe.dygraph.tensor_parallel.layer import split_axis
from fleetpipe.paddle_api import paddle

#: Parameters, each with its gradient.
Pairs = list[tuple[Tensor, Tensor]]


class SlicedNormClip(paddle.nn.ClipGradByNorm):
    """Takes the place of the ``ClipGradByNorm`` of an optimizer where layers are cut."""

    def __init__(self, clip: Clip) -> None:
        """Clips to the norm that ``clip``, a ``ClipGradByNorm``, clips to."""
        super().__init__(clip.clip_norm)

    @paddle.no_grad()
    def __call__(self, params_grads: Pairs) -> Pairs:
        """Returns the pairs with clipped gradients. Collective where some of them are shards.

        Raises:
            PipelineTimeout: Some member did not come within the limit.
        """
        cut = {id(p): g for p, g in params_grads if g is not None and _cut_and_clipped(p)}
        if not cut:
            whole: Pairs = super().__call__(params_grads)
            return whole
        squares = [(grad.astype("float32") ** 2).sum() for grad in cut.values()]
        totals = total(paddle.stack(squares), members_of(model_parallel_group()))
        most = paddle.full([], self.clip_norm, totals.dtype)
        factors = dict(zip(cut, most / paddle.sqrt(totals).maximum(most)))
        clipped: Pairs = []
        for parameter, grad in params_grads:
            if id(parameter) in cut:
                factor = factors[id(parameter)].astype(grad.dtype)
                clipped.append((parameter, grad * factor))
            else:
                clipped += super().__call__([(parameter, grad)])
        return clipped


def _cut_and_clipped(parameter: Tensor) -> bool:
    return split_axis(parameter) is not None and getattr(parameter, "need_clip", True) is not False
