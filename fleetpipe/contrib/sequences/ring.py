"""Attention over sequences that are split along cp: ranks send each other keys and values.

In each of n - 1 rounds every rank sends its own two chunks to another rank, one after the other,
and receives those of a third (Liu et al., Ring Attention, arXiv:2310.01889; here chunks come
straight from their owner). Besides its own chunks a rank holds one other chunk, and the copy of a
chunk that it sends: at most two of the n parts of all keys and values. Backward fetches the chunks
again, and sends their gradients back to the owners, which add them in the order of the rounds.

Attention runs in tiles: queries see the keys of one chunk after another. Of earlier chunks, each
query keeps the greatest score, the sum of the exponentials relative to it, and the sum of the
values weighted by them (Milakov and Gimelshein, arXiv:1805.02867; Dao et al., FlashAttention,
arXiv:2205.14135). No matrix of all scores is in memory, only one of ``TILE`` queries by as many
keys for each head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from fleetpipe.aliases import Context, Tensor
from fleetpipe.contrib.sequences.parts import SequenceRanks
from fleetpipe.dygraph.tensor_parallel.operations import noting
from fleetpipe.paddle_api import paddle

#: The queries, and the keys, of a tile.
TILE = 512


class Chunk(NamedTuple):
    """Consecutive positions of sequences.

    Args:
        begin: The first position.
        values: ``[.., positions, size]``.
        documents: ``[rows, positions]``; a query sees only keys with its own number. None if it
            sees all.
    """

    begin: int
    values: Tensor
    documents: Tensor | None

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.begin + int(self.values.shape[-2])

    def tiles(self) -> Iterator[Chunk]:
        """Yields the chunk in parts of at most ``TILE`` positions."""
        for start in range(0, self.end - self.begin, TILE):
            part = slice(start, min(start + TILE, self.end - self.begin))
            documents = None if self.documents is None else self.documents[:, part]
            yield Chunk(self.begin + start, self.values[..., part, :], documents)


class OnlineSoftmax:
    """Computes attention for a tile of queries, forward, from one tile of keys after another."""

    def __init__(self, queries: Chunk) -> None:
        """Starts with scaled queries ``[rows, heads of keys, heads for each, positions, size]``."""
        self.queries = queries
        like = queries.values
        lowest = float(paddle.finfo(like.dtype).min)
        self._top = paddle.full([*like.shape[:-1], 1], lowest, like.dtype)
        self._total = paddle.zeros_like(self._top)
        self._sum = paddle.zeros_like(like)

    def see(self, keys: Chunk, causal: bool) -> None:
        """Adds a tile ``[2, rows, heads, positions, size]`` of keys and values."""
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
    """Computes the gradient of a tile of queries, backward, from one tile of keys after another."""

    def __init__(self, queries: Chunk, output: Tensor, log_total: Tensor, grad: Tensor) -> None:
        """Starts with the arguments and results of the forward, and the output's gradient."""
        self.queries = queries
        self.grad = paddle.zeros_like(queries.values)
        self._log_total, self._output_grad = log_total, grad
        self._share = (output * grad).sum(axis=-1, keepdim=True)

    def see(self, keys: Chunk, causal: bool) -> Tensor | None:
        """Returns the part of a key-and-value tile's gradient that is due to these queries."""
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
    """Returns the scores ``[.., queries, keys]``, -inf where masked; None if all are masked."""
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


class _Round(NamedTuple):
    """The exchange of one chunk: this rank sends to ``target`` and receives from ``source``."""

    target: int
    source: int
    number: int


class Ring:
    """Describes the chunks of all cp ranks, and fetches those of the others."""

    def __init__(
        self, ranks: SequenceRanks, length: int, documents: Tensor | None, causal: bool
    ) -> None:
        """Collects the documents of all ranks along cp. Collective over cp.

        Args:
            ranks: The ranks that share the sequences.
            length: The number of positions of the whole sequences.
            documents: ``[rows, length / cp]``; None if a query sees all documents.
            causal: Whether a query sees only keys at its own position and before.
        """
        self.causal = causal
        self._group = ranks.cp
        self._bounds = [ranks.chunks(length, rank) for rank in range(self._group.ranks)]
        gathered = self._group.all_gather(None if documents is None else documents.clone())
        self._documents = [_parts(part, len(self._bounds[0])) for part in gathered]

    def cut(self, values: Tensor) -> list[Chunk]:
        """Cuts this rank's values into chunks ``[.., positions, size]``."""
        rank = self._group.rank
        return [
            self._chunk(rank, number, part)
            for number, part in enumerate(paddle.split(values, len(self._bounds[rank]), axis=-2))
        ]

    def rounds(self) -> Iterator[_Round]:
        """Yields the exchanges in an order that is the same on all ranks."""
        rank, ranks = self._group.rank, self._group.ranks
        for distance in range(1, ranks):
            for number in range(len(self._bounds[rank])):
                yield _Round((rank + distance) % ranks, (rank - distance) % ranks, number)

    def fetch(self, turn: _Round, chunks: Sequence[Chunk]) -> Chunk | None:
        """Returns another rank's chunk; None if no query here sees it. Collective over cp."""
        here = chunks[turn.number]
        sent = here.values if self._sees(turn.target, here.begin) else None
        taken = self._swap(turn.target, sent, turn.source)
        chunk = self._chunk(turn.source, turn.number, taken)
        return chunk if self._sees(self._group.rank, chunk.begin) else None

    def give_back(self, turn: _Round, gradient: Tensor | None) -> Tensor | None:
        """Returns the gradient of an own chunk due to ``target``'s queries. Collective over cp.

        Args:
            turn: The round in which it was fetched.
            gradient: The gradient of ``source``'s chunk; None if no query here sees it.
        """
        returned = self._swap(turn.source, gradient, turn.target)
        begin, _ = self._bounds[self._group.rank][turn.number]
        return returned if self._sees(turn.target, begin) else None

    def _sees(self, rank: int, begin: int) -> bool:
        """Whether any query of a rank sees a key of the chunk that begins at a position."""
        return not self.causal or begin < self._bounds[rank][-1][1]

    def _chunk(self, rank: int, number: int, values: Tensor) -> Chunk:
        return Chunk(self._bounds[rank][number][0], values, self._documents[rank][number])

    def _swap(self, target: int, value: Tensor | None, source: int) -> Tensor:
        empty = paddle.zeros([0])
        sent = empty if value is None else value
        parts = [sent if rank == target else empty for rank in range(self._group.ranks)]
        return self._group.all_to_all(parts)[source]


class _RingAttention(paddle.autograd.PyLayer):
    @staticmethod
    def forward(
        ctx: Context,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Tensor | None,
        ranks: SequenceRanks,
        causal: bool,
    ) -> Tensor:
        ring = Ring(ranks, query.shape[1] * ranks.cp.ranks, documents, causal)
        queries, keys = _by_head(query, key.shape[2]), paddle.stack([key, value])
        keys = keys.transpose([0, 1, 3, 2, 4])
        rows = [OnlineSoftmax(tile) for chunk in ring.cut(queries) for tile in chunk.tiles()]
        chunks = ring.cut(keys)
        for chunk in chunks:
            _look(rows, chunk, ring.causal)
        for turn in ring.rounds():
            _look(rows, ring.fetch(turn, chunks), ring.causal)
        results = [one.result() for one in rows]
        output, log_total = (paddle.concat(part, axis=-2) for part in zip(*results))
        ctx.save_for_backward(queries, keys, output, log_total)
        ctx.ring, ctx.packed = ring, documents is not None
        ctx.trained = [not one.stop_gradient for one in (query, key, value)]
        return _by_position(output)

    @staticmethod
    @noting
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, ...]:
        queries, keys, *results = ctx.saved_tensor()
        ring: Ring = ctx.ring
        results.append(_by_head(grad, queries.shape[1]))
        parts = zip(*([chunk.tiles() for chunk in ring.cut(value)] for value in results))
        rows = []
        for chunk, tiles in zip(ring.cut(queries), parts):
            for tile, *values in zip(chunk.tiles(), *tiles):
                rows.append(AttentionBackward(tile, *(one.values for one in values)))
        chunks = ring.cut(keys)
        totals: list[Tensor] = [_look_back(rows, chunk, ring.causal) for chunk in chunks]
        for turn in ring.rounds():
            gradient = _look_back(rows, ring.fetch(turn, chunks), ring.causal)
            returned = ring.give_back(turn, gradient)
            if returned is not None:
                totals[turn.number] = totals[turn.number] + returned
        keys_grad = paddle.concat(totals, axis=-2).transpose([0, 1, 3, 2, 4])
        query_grad = _by_position(paddle.concat([one.grad for one in rows], axis=-2))
        grads = of_trained((query_grad, keys_grad[0], keys_grad[1]), ctx.trained)
        # There is one for each tensor of the forward.
        return *grads, *([None] if ctx.packed else [])


def of_trained(grads: Sequence[Tensor], trained: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Returns the gradients of tensors that need one, and the None that Paddle asks of others."""
    return tuple(grad if needed else None for grad, needed in zip(grads, trained))


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor | None,
    ranks: SequenceRanks,
    causal: bool,
) -> Tensor:
    """Returns the attention of this rank's queries to the keys of all cp ranks. Collective.

    Args:
        query: The scaled queries, ``[rows, positions, heads, size]``.
        key: The keys, ``[rows, positions, heads of keys, size]``.
        value: The values, of the same shape as ``key``.
        documents: Integers ``[rows, positions]``, or None if a query sees all keys. They stand
            among the tensors, as a captured model gives others in each call.
        ranks: The ranks that share the sequences.
        causal: Whether a query sees only keys at its own position and before.
    """
    apply: Callable[..., Tensor] = _RingAttention.apply
    return apply(query, key, value, documents, ranks, causal)


def _look(rows: Sequence[OnlineSoftmax], keys: Chunk | None, causal: bool) -> None:
    for tile in () if keys is None else keys.tiles():
        for one in rows:
            one.see(tile, causal)


def _look_back(
    rows: Sequence[AttentionBackward], keys: Chunk | None, causal: bool
) -> Tensor | None:
    """Returns the gradient of a chunk of keys and values."""
    if keys is None:
        return None
    totals = []
    for tile in keys.tiles():
        total = paddle.zeros_like(tile.values)
        for one in rows:
            added = one.see(tile, causal)
            total = total if added is None else total + added
        totals.append(total)
    return paddle.concat(totals, axis=-2)


def _by_head(values: Tensor, heads: int) -> Tensor:
    """Turns ``[rows, positions, heads, size]`` into ``[rows, heads, rest, positions, size]``."""
    rows, length, every, size = values.shape
    return values.reshape([rows, length, heads, every // heads, size]).transpose([0, 2, 3, 1, 4])


def _by_position(values: Tensor) -> Tensor:
    """Undoes :func:`_by_head`."""
    rows, heads, each, length, size = values.shape
    return values.transpose([0, 3, 1, 2, 4]).reshape([rows, length, heads * each, size])


def _parts(documents: Tensor | None, chunks: int) -> list[Tensor | None]:
    if documents is None:
        return [None] * chunks
    return [*paddle.split(documents, chunks, axis=-1)]
