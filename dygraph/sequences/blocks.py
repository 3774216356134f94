"""Attention in tiles: the online softmax, and its gradients, of some queries over some keys.

Queries see the keys of one chunk after another; what is kept of those before is, for each query,
the greatest score, the sum of the exponentials above that, and the sum of the values weighed by
them (Milakov and Gimelshein, arXiv:1805.02867; Dao et al., FlashAttention, arXiv:2205.14135). No
matrix of all scores is in memory, only one of ``TILE`` queries by as many keys for each head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fleetpipe.aliases import Tensor
from fleetpipe.paddle_api import paddle

#: Queries, and keys, of a tile.
TILE = 512


class Chunk(NamedTuple):
    """Consecutive places of sequences.

    Args:
        begin: The first place.
        values: ``[.., places, size]``.
        documents: ``[rows, places]``, of which a query sees those that are equal to its own; None
            where it sees all.
    """

    begin: int
    values: Tensor
    documents: Tensor | None

    @property
    def end(self) -> int:
        """The place after the last."""
        return self.begin + int(self.values.shape[-2])

    def tiles(self) -> Iterator[Chunk]:
        """Yields its parts of at most ``TILE`` places."""
        for start in range(0, self.end - self.begin, TILE):
            part = slice(start, min(start + TILE, self.end - self.begin))
            documents = None if self.documents is None else self.documents[:, part]
            yield Chunk(self.begin + start, self.values[..., part, :], documents)


class OnlineSoftmax:
    """A tile of queries in forward: what they have seen so far."""

    def __init__(self, queries: Chunk) -> None:
        """Takes queries ``[rows, heads of keys, heads for each, places, size]``, scaled already."""
        self.queries = queries
        like = queries.values
        lowest = float(paddle.finfo(like.dtype).min)
        self._top = paddle.full([*like.shape[:-1], 1], lowest, like.dtype)
        self._total = paddle.zeros_like(self._top)
        self._sum = paddle.zeros_like(like)

    def see(self, keys: Chunk, causal: bool) -> None:
        """Takes a tile ``[2, rows, heads, places, size]`` of keys and values."""
        scores = _scores(self.queries, keys, causal)
        if scores is None:
            return
        top = self._top.maximum(scores.max(axis=-1, keepdim=True))
        weights, fading = (scores - top).exp(), (self._top - top).exp()
        self._total = self._total * fading + weights.sum(axis=-1, keepdim=True)
        self._sum = self._sum * fading + weights.matmul(keys.values[1].unsqueeze(2))
        self._top = top

    def result(self) -> tuple[Tensor, Tensor]:
        """Returns the output, and the logarithm of the sum of the exponentials of all scores."""
        return self._sum / self._total, self._top + paddle.log(self._total)


class AttentionBackward:
    """A tile of queries in backward: gathers their gradient."""

    def __init__(self, queries: Chunk, output: Tensor, log_total: Tensor, grad: Tensor) -> None:
        """Takes what forward took and returned for them, and the gradient of the output."""
        self.queries = queries
        self.grad = paddle.zeros_like(queries.values)
        self._log_total, self._output_grad = log_total, grad
        self._share = (output * grad).sum(axis=-1, keepdim=True)

    def see(self, keys: Chunk, causal: bool) -> Tensor | None:
        """Returns what these queries add to the gradient of a tile of keys and values."""
        scores = _scores(self.queries, keys, causal)
        if scores is None:
            return None
        key, value = keys.values[0].unsqueeze(2), keys.values[1].unsqueeze(2)
        weights = (scores - self._log_total).exp()
        above = self._output_grad.matmul(value, transpose_y=True) - self._share
        scores_grad = above * weights
        self.grad = self.grad + scores_grad.matmul(key)
        key_grad = scores_grad.matmul(self.queries.values, transpose_x=True)
        value_grad = weights.matmul(self._output_grad, transpose_x=True)
        # Queries of several heads share the keys of one.
        return paddle.stack([key_grad.sum(axis=2), value_grad.sum(axis=2)])


def _scores(queries: Chunk, keys: Chunk, causal: bool) -> Tensor | None:
    """Returns the scores ``[.., queries, keys]``, -inf for what is not seen; None if nothing is."""
    if causal and keys.begin >= queries.end:
        return None
    scores = queries.values.matmul(keys.values[0].unsqueeze(2), transpose_y=True)
    seen = None
    if causal and keys.end > queries.begin + 1:
        places = paddle.arange(queries.begin, queries.end).unsqueeze(-1)
        seen = (places >= paddle.arange(keys.begin, keys.end)).unsqueeze([0, 1, 2])
    if queries.documents is not None and keys.documents is not None:
        same = queries.documents.unsqueeze(-1) == keys.documents.unsqueeze(-2)
        same = same.unsqueeze([1, 2])
        seen = same if seen is None else paddle.logical_and(seen, same)
    if seen is None:
        return scores
    return paddle.where(seen, scores, paddle.full([], float("-inf"), scores.dtype))
