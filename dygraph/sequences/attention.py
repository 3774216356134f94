"""Attention whose sequences are split over ranks."""

from __future__ import annotations

from fleetpipe.aliases import Tensor
from fleetpipe.dygraph.sequences.exchange import to_heads, to_places
from fleetpipe.dygraph.sequences.parts import SequenceRanks, sequence_ranks
from fleetpipe.dygraph.sequences.ring import Ring, ring_attention
from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api import paddle

_HALVES = (paddle.float16, paddle.bfloat16)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool = True,
    documents: Tensor | None = None,
    scale: float | None = None,
    ranks: SequenceRanks | None = None,
) -> Tensor:
    """Returns the attention of this rank's places to all places of the sequences.

    Collective over the sep and cp ranks, forward and backward. It computes in tiles and keeps no
    matrix of scores: with one rank too.

    Args:
        query: ``[rows, places, heads, size]``: this rank's places.
        key: ``[rows, places, heads of keys, size]``; several heads may share the keys of one.
        value: As ``key``.
        causal: Whether a place sees only itself and those before.
        documents: Integers ``[rows, places]`` for packed sequences: a place sees only those with
            the same number; see :func:`documents_of`.
        scale: The factor of the scores; by default one over the root of ``size``.
        ranks: The ranks that share the sequences; by default those of the job's sep and cp axes.

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
    if dtype in _HALVES:
        query, key, value = (tensor.astype("float32") for tensor in (query, key, value))
    query = query * (query.shape[-1] ** -0.5 if scale is None else scale)
    query, key, value = to_heads(ranks.sep, query, key, value)
    if documents is not None:
        documents = paddle.concat(ranks.sep.all_gather(documents.clone()), axis=1)
    ring = Ring(ranks, query.shape[1] * ranks.cp.ranks, documents, causal)
    output = to_places(ranks.sep, ring_attention(query, key, value, ring))
    return output.astype(dtype)


def _require_shapes(query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None) -> None:
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
