"""Attention over sequences that are split over ranks.

Along sep every rank has some positions of all heads. An all_to_all gives it all positions of some
heads, on which attention runs as on one rank (Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fleetpipe.aliases import Context, Tensor
from fleetpipe.contrib.sequences.parts import SequenceRanks, sequence_ranks
from fleetpipe.contrib.sequences.ring import mask_untrained, ring_attention
from fleetpipe.dygraph.tensor_parallel.operations import recording_errors
from fleetpipe.errors import ConfigError
from fleetpipe.mesh import groups
from fleetpipe.mesh.groups import Group
from fleetpipe.paddle_api import paddle

_HALF_DTYPES = (paddle.float16, paddle.bfloat16)

#: Axes of ``[rows, positions, heads, size]``.
_POSITIONS, _HEADS = 1, 2


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool = True,
    documents: Tensor | None = None,
    scale: float | None = None,
    ranks: SequenceRanks | None = None,
) -> Tensor:
    """Computes the attention of this rank's positions to all positions of the sequences.

    Collective over the sep and cp ranks, forward and backward. It computes in tiles and never keeps
    a whole matrix of scores, also with one rank.

    Args:
        query: The queries of this rank's positions, ``[rows, positions, heads, size]``.
        key: The keys, ``[rows, positions, heads of keys, size]``; several heads may share keys.
        value: The values, of the same shape as ``key``.
        causal: Whether a position sees only itself and those before.
        documents: Integers ``[rows, positions]`` for packed sequences: a position sees only
            positions with the same number; see :func:`documents_of`.
        scale: The factor of the scores; by default one over the root of ``size``.
        ranks: The ranks that share the sequences; by default the job's sep and cp ranks.

    Returns:
        A tensor like ``query``.

    Raises:
        ConfigError: The shapes do not fit each other or the degrees.
        PipelineTimeout: Some rank did not come within the limit.
    """
    ranks = sequence_ranks() if ranks is None else ranks
    _require_shapes(query, key, value, documents)
    ranks.require(query.shape[1] * ranks.ranks)
    packed = "no documents" if documents is None else "documents"
    dtype = query.dtype
    kinds = ", ".join(str(tensor.dtype).rpartition(".")[2] for tensor in (query, key, value))
    shapes = f"{list(query.shape)} of {kinds}, {key.shape[2]} heads of keys"
    ranks.require_alike(f"{shapes}, {causal=}, {scale=}, {packed}")
    if dtype in _HALF_DTYPES:
        query, key, value = (tensor.astype("float32") for tensor in (query, key, value))
    groups.note_attention(query, key)
    query = query * (query.shape[-1] ** -0.5 if scale is None else scale)
    query, key, value = to_heads(ranks.sep, query, key, value)
    if documents is not None:
        documents = paddle.concat(ranks.sep.all_gather(documents.clone()), axis=1)
    seen = ring_attention(query, key, value, documents, ranks, causal)
    output = to_places(ranks.sep, seen)
    return output.astype(dtype)


def _require_shapes(query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None) -> None:
    """Raises ConfigError if the arguments of :func:`attention` do not fit each other."""
    for name, tensor in {"query": query, "key": key, "value": value}.items():
        if not isinstance(tensor, paddle.Tensor):
            raise ConfigError(
                f"{name} is no Tensor", got=type(tensor).__name__, fix=f"paddle.to_tensor({name})"
            )
    rows, length, heads, size = query.shape if query.ndim == 4 else (0, 0, 0, 0)
    shared = key.shape[2] if key.ndim == 4 else 0
    fits = list(key.shape) == list(value.shape) == [rows, length, shared, size]
    if not size or not fits or not shared or heads % shared:
        raise ConfigError(
            "attention takes a query, a key and a value of the same places",
            expected="[rows, places, heads, size], and for key and value heads that divide these",
            got=f"query {query.shape}, key {key.shape}, value {value.shape}",
            fix="give all three this rank's places; nothing is attended to from elsewhere",
        )
    if documents is not None and list(getattr(documents, "shape", ())) != [rows, length]:
        raise ConfigError(
            "there is one document for each place",
            expected=f"integers {[rows, length]}",
            got=f"{getattr(documents, 'shape', documents)}",
            fix="documents = own_part(documents_of(position_ids))",
        )


class _Exchange(paddle.autograd.PyLayer):
    """Exchanges positions for heads among sep ranks, or back; the backward goes the other way."""

    @staticmethod
    def forward(
        ctx: Context, group: Group, split_axis: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.split_axis = group, split_axis
        ctx.trained = [not tensor.stop_gradient for tensor in tensors]
        return _exchange_axes(group, split_axis, tensors)

    @staticmethod
    @recording_errors
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, ...]:
        grads = _exchange_axes(ctx.group, _POSITIONS + _HEADS - ctx.split_axis, grads)
        return mask_untrained(grads, ctx.trained)


_exchange: Callable[..., tuple[Tensor, ...]] = _Exchange.apply


def to_heads(group: Group, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Exchanges positions for heads among the sep ranks. Collective.

    A rank passes some positions of all heads, and gets all positions of some heads.

    Args:
        group: The sep ranks.
        query: ``[rows, positions, heads, size]``.
        key: The keys, with the same positions and size. If they have fewer heads than there are
            ranks, several ranks get the same heads.
        value: The values, of the same shape as ``key``.

    Raises:
        ConfigError: The ranks cannot have equal shares of the heads.
    """
    if group.ranks == 1:
        return query, key, value
    heads = query.shape[_HEADS]
    if heads % group.ranks:
        raise _heads_error(heads, group.ranks, f"a multiple of {group.ranks} heads")
    keys = (_repeat_heads(tensor, group.ranks) for tensor in (key, value))
    return _exchange(group, _HEADS, query, *keys)


def to_places(group: Group, tensor: Tensor) -> Tensor:
    """Exchanges heads for positions again, after :func:`to_heads`. Collective over sep."""
    return tensor if group.ranks == 1 else _exchange(group, _POSITIONS, tensor)[0]


def _exchange_axes(group: Group, split_axis: int, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Splits tensors along one axis over a group, and joins what arrives along the other axis.

    All tensors travel in one message for each member, joined along the heads. Collective.

    Args:
        group: The sep ranks.
        split_axis: ``_HEADS`` or ``_POSITIONS``; parts are joined along the other one.
        tensors: ``[rows, positions, heads, size]`` each.
    """
    by_tensor = [paddle.split(tensor, group.ranks, axis=split_axis) for tensor in tensors]
    heads = [parts[0].shape[_HEADS] for parts in by_tensor]
    received = group.all_to_all(
        [paddle.concat(list(parts), axis=_HEADS) for parts in zip(*by_tensor)]
    )
    received_by_tensor = zip(*(paddle.split(message, heads, axis=_HEADS) for message in received))
    join_axis = _POSITIONS + _HEADS - split_axis
    return tuple(paddle.concat(list(parts), axis=join_axis) for parts in received_by_tensor)


def _repeat_heads(tensor: Tensor, ranks: int) -> Tensor:
    """Repeats each head of keys for several ranks if there are fewer heads than ranks.

    Raises:
        ConfigError: Neither number divides the other.
    """
    heads = tensor.shape[_HEADS]
    if heads % ranks == 0:
        return tensor
    if ranks % heads:
        expected = f"a multiple of {ranks} heads, or a number that divides {ranks}"
        raise _heads_error(heads, ranks, expected)
    return paddle.repeat_interleave(tensor, ranks // heads, axis=_HEADS)


def _heads_error(heads: int, ranks: int, expected: str) -> ConfigError:
    """Returns the error for a number of heads that sep ranks cannot share."""
    return ConfigError(
        f"{heads} heads cannot be shared out to sep_degree={ranks} ranks",
        expected=expected,
        fix="choose another sep_degree, or split the sequence by cp_degree",
    )
