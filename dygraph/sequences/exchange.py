"""Places for heads: between the parts of a sequence and whole sequences of some heads.

Every sep rank has some places of all heads; an all_to_all gives it all places of some heads, for
which attention is as on one rank (Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fleetpipe.aliases import Context, Tensor
from fleetpipe.dygraph.tensor_parallel.operations import noting
from fleetpipe.errors import ConfigError
from fleetpipe.mesh.groups import Group
from fleetpipe.paddle_api import paddle

#: Axes of ``[rows, places, heads, size]``.
_PLACES, _HEADS = 1, 2


class _Exchange(paddle.autograd.PyLayer):
    @staticmethod
    def forward(ctx: Context, group: Group, cut: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.cut = group, cut
        return _exchanged(group, cut, tensors)

    @staticmethod
    @noting
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, ...]:
        return _exchanged(ctx.group, _PLACES + _HEADS - ctx.cut, grads)


_exchange: Callable[..., tuple[Tensor, ...]] = _Exchange.apply


def to_heads(group: Group, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Returns all places of this rank's share of the heads, for its places of all. Collective.

    Args:
        group: The sep ranks.
        query: ``[rows, places, heads, size]``.
        key: Of the same places and size. Where there are fewer heads than ranks, several ranks get
            the same ones.
        value: As ``key``.

    Raises:
        ConfigError: The ranks cannot have equal shares of the heads.
    """
    if group.ranks == 1:
        return query, key, value
    heads = query.shape[_HEADS]
    if heads % group.ranks:
        raise _indivisible(heads, group.ranks, f"a multiple of {group.ranks} heads")
    keys = (_divisible(tensor, group.ranks) for tensor in (key, value))
    return _exchange(group, _HEADS, query, *keys)


def to_places(group: Group, tensor: Tensor) -> Tensor:
    """Does what undoes :func:`to_heads`. Collective."""
    return tensor if group.ranks == 1 else _exchange(group, _PLACES, tensor)[0]


def _exchanged(group: Group, cut: int, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Sends all tensors at once, beside each other along the heads."""
    cuts = [paddle.split(tensor, group.ranks, axis=cut) for tensor in tensors]
    heads = [parts[0].shape[_HEADS] for parts in cuts]
    arrived = group.all_to_all([paddle.concat(list(parts), axis=_HEADS) for parts in zip(*cuts)])
    apart = zip(*(paddle.split(part, heads, axis=_HEADS) for part in arrived))
    return tuple(paddle.concat(list(parts), axis=_PLACES + _HEADS - cut) for parts in apart)


def _divisible(tensor: Tensor, ranks: int) -> Tensor:
    """Returns the heads, repeated where there are fewer than ranks: of keys that queries share."""
    heads = tensor.shape[_HEADS]
    if heads % ranks == 0:
        return tensor
    if ranks % heads:
        expected = f"a multiple of {ranks} heads, or a number that divides {ranks}"
        raise _indivisible(heads, ranks, expected)
    return paddle.repeat_interleave(tensor, ranks // heads, axis=_HEADS)


def _indivisible(heads: int, ranks: int, expected: str) -> ConfigError:
    return ConfigError(
        f"{heads} heads cannot be shared out to sep_degree={ranks} ranks",
        expected=expected,
        fix="choose another sep_degree, or split the sequence by cp_degree",
    )
