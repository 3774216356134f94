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
from fleetpipe.dygraph.tensor_parallel.operations import recording_errors
from fleetpipe.paddle_api import paddle

#: The queries, and the keys, of a tile.
TILE = 512


class Chunk(NamedTuple):
    """Queries, or keys and values, at consecutive positions of sequences.

    Args:
        begin: The first position.
        values: ``[.., positions, size]``.
        documents: Numbers ``[rows, positions]``: a query sees only keys with the query's number;
            None if it sees all.
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
        """Begins without keys.

        Args:
            queries: Scaled, ``[rows, heads of keys, queries' heads for each, positions, size]``.
        """
        self.queries = queries
        like = queries.values
        lowest = float(paddle.finfo(like.dtype).min)
        #: Of the keys so far: the greatest score, the sum of exponentials, and that of values.
        self._highest = paddle.full([*like.shape[:-1], 1], lowest, like.dtype)
        self._exp_sum = paddle.zeros_like(self._highest)
        self._value_sum = paddle.zeros_like(like)

    def add(self, keys: Chunk, causal: bool) -> None:
        """Adds a tile of keys and values.

        Args:
            keys: The tile, with ``values`` [2, rows, heads, positions, size]: keys (0) and values
                (1).
            causal: Whether a query sees only keys at its own position and before.
        """
        scores = _scores(self.queries, keys, causal)
        if scores is None:
            return
        highest = self._highest.maximum(scores.max(axis=-1, keepdim=True))
        weights, rescale = (scores - highest).exp(), (self._highest - highest).exp()
        self._exp_sum = self._exp_sum * rescale + weights.sum(axis=-1, keepdim=True)
        self._value_sum = self._value_sum * rescale + weights.matmul(keys.values[1].unsqueeze(2))
        self._highest = highest

    def result(self) -> tuple[Tensor, Tensor]:
        """Returns the output, and the logarithm of the sum of the exponentials of all scores."""
        return self._value_sum / self._exp_sum, self._highest + paddle.log(self._exp_sum)


class AttentionBackward:
    """Computes the gradient of a tile of queries, backward, from one tile of keys after another."""

    def __init__(self, queries: Chunk, output: Tensor, log_total: Tensor, grad: Tensor) -> None:
        """Begins without keys.

        Args:
            queries: As in the forward.
            output: The output of the forward for these queries.
            log_total: The logarithm of the sum of exponentials that the forward returned.
            grad: The gradient of the output.
        """
        self.queries = queries
        self.grad = paddle.zeros_like(queries.values)
        self._log_total, self._output_grad = log_total, grad
        #: The mean of the weights' gradients, by which the backward of a softmax reduces each.
        self._weighted_mean = (output * grad).sum(axis=-1, keepdim=True)

    def add(self, keys: Chunk, causal: bool) -> Tensor | None:
        """Adds what a tile of keys and values contributes to the queries' gradient, ``grad``.

        Returns:
            What these queries contribute to the gradient of the tile; None if they see none of it.
        """
        scores = _scores(self.queries, keys, causal)
        if scores is None:
            return None
        key, value = keys.values[0].unsqueeze(2), keys.values[1].unsqueeze(2)
        weights = (scores - self._log_total).exp()
        weights_grad = self._output_grad.matmul(value, transpose_y=True)
        scores_grad = (weights_grad - self._weighted_mean) * weights
        self.grad = self.grad + scores_grad.matmul(key)
        key_grad = scores_grad.matmul(self.queries.values, transpose_x=True)
        value_grad = weights.matmul(self._output_grad, transpose_x=True)
        # Queries of several heads share the keys of one.
        return paddle.stack([key_grad.sum(axis=2), value_grad.sum(axis=2)])


def _scores(queries: Chunk, keys: Chunk, causal: bool) -> Tensor | None:
    """Returns the scores ``[.., queries, keys]``, -inf where masked; None if all are masked.

    Args:
        queries: The queries, as for :class:`OnlineSoftmax`.
        keys: The tile, as for :meth:`OnlineSoftmax.add`; only its keys are used.
        causal: Whether a query sees only keys at its own position and before.
    """
    if causal and keys.begin >= queries.end:
        return None
    scores = queries.values.matmul(keys.values[0].unsqueeze(2), transpose_y=True)
    mask = None  # True where a query sees a key
    if causal and keys.end > queries.begin + 1:
        positions = paddle.arange(queries.begin, queries.end).unsqueeze(-1)
        mask = (positions >= paddle.arange(keys.begin, keys.end)).unsqueeze([0, 1, 2])
    if queries.documents is not None and keys.documents is not None:
        same = queries.documents.unsqueeze(-1) == keys.documents.unsqueeze(-2)
        same = same.unsqueeze([1, 2])
        mask = same if mask is None else paddle.logical_and(mask, same)
    if mask is None:
        return scores
    return paddle.where(mask, scores, paddle.full([], float("-inf"), scores.dtype))


class _Round(NamedTuple):
    """An exchange in which every rank sends a chunk to one rank, and receives one from another.

    Attributes:
        target: The cp rank to which this rank sends.
        source: The cp rank from which this rank receives.
        chunk: Which of its chunks each rank sends: 0 or 1.
    """

    target: int
    source: int
    chunk: int


class Ring:
    """Fetches the chunks of keys and values of other cp ranks, and returns their gradients."""

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
        #: By cp rank and chunk: the first position, and the one after the last.
        self._bounds = [ranks.chunks(length, rank) for rank in range(self._group.ranks)]
        gathered = self._group.all_gather(None if documents is None else documents.clone())
        #: By cp rank and chunk: the documents of its positions, or None.
        self._documents = [_split_documents(part, len(self._bounds[0])) for part in gathered]

    def cut(self, values: Tensor) -> list[Chunk]:
        """Cuts this rank's values ``[.., positions, size]`` into its chunks."""
        rank = self._group.rank
        return [
            self._chunk(rank, number, part)
            for number, part in enumerate(paddle.split(values, len(self._bounds[rank]), axis=-2))
        ]

    def rounds(self) -> Iterator[_Round]:
        """Yields the exchanges of this rank, in an order that is the same on all ranks.

        Rank r first sends each of its chunks to rank r + 1, then each to rank r + 2, and so on.
        """
        rank, ranks = self._group.rank, self._group.ranks
        for distance in range(1, ranks):
            target, source = (rank + distance) % ranks, (rank - distance) % ranks
            for number in range(len(self._bounds[rank])):
                yield _Round(target=target, source=source, chunk=number)

    def fetch(self, turn: _Round, chunks: Sequence[Chunk]) -> Chunk | None:
        """Fetches a chunk of ``turn.source``, and sends one to ``turn.target``. Collective over cp.

        A chunk is sent as an empty tensor if no query of the receiver sees it.

        Args:
            turn: The exchange, one of :meth:`rounds`.
            chunks: The keys and values of this rank, in its chunks.

        Returns:
            The fetched chunk; None if no query of this rank sees it.
        """
        own_chunk = chunks[turn.chunk]
        is_seen = self._has_query_for(turn.target, own_chunk.begin)
        received = self._send_and_receive(
            turn.target, own_chunk.values if is_seen else None, turn.source
        )
        chunk = self._chunk(turn.source, turn.chunk, received)
        return chunk if self._has_query_for(self._group.rank, chunk.begin) else None

    def give_back(self, turn: _Round, gradient: Tensor | None) -> Tensor | None:
        """Sends the gradient of a fetched chunk back to the chunk's rank. Collective over cp.

        Args:
            turn: The exchange by which the chunk was fetched.
            gradient: The gradient of that chunk; None if no query of this rank sees it.

        Returns:
            The gradient of the chunk that this rank sent to ``turn.target``; None if no query there
            sees it.
        """
        returned = self._send_and_receive(turn.source, gradient, turn.target)
        begin, _ = self._bounds[self._group.rank][turn.chunk]
        return returned if self._has_query_for(turn.target, begin) else None

    def _has_query_for(self, rank: int, begin: int) -> bool:
        """Returns whether any query of a cp rank sees the chunk that begins at a position."""
        _, end_of_rank = self._bounds[rank][-1]
        return not self.causal or begin < end_of_rank

    def _chunk(self, rank: int, number: int, values: Tensor) -> Chunk:
        """Returns chunk ``number`` (0 or 1) of a cp rank, with the given values."""
        begin, _ = self._bounds[rank][number]
        return Chunk(begin, values, self._documents[rank][number])

    def _send_and_receive(self, target: int, value: Tensor | None, source: int) -> Tensor:
        """Sends a value to a cp rank, and receives one from another. Collective over cp.

        Args:
            target: The rank to which this rank sends.
            value: The value; for None an empty tensor is sent.
            source: The rank from which this rank receives.

        Returns:
            What ``source`` sends: its value, or an empty tensor.
        """
        empty = paddle.zeros([0])
        sent = empty if value is None else value
        by_receiver = [sent if rank == target else empty for rank in range(self._group.ranks)]
        return self._group.all_to_all(by_receiver)[source]


class _RingAttention(paddle.autograd.PyLayer):
    """Computes :func:`ring_attention`; its backward fetches all chunks again."""

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
        tiles = [OnlineSoftmax(tile) for chunk in ring.cut(queries) for tile in chunk.tiles()]
        chunks = ring.cut(keys)
        for chunk in chunks:
            _add_chunk(tiles, chunk, ring.causal)
        for turn in ring.rounds():
            _add_chunk(tiles, ring.fetch(turn, chunks), ring.causal)
        results = [tile.result() for tile in tiles]
        output, log_total = (paddle.concat(part, axis=-2) for part in zip(*results))
        ctx.save_for_backward(queries, keys, output, log_total)
        ctx.ring, ctx.has_documents = ring, documents is not None
        ctx.trained = [not tensor.stop_gradient for tensor in (query, key, value)]
        return _by_position(output)

    @staticmethod
    @recording_errors
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, ...]:
        queries, keys, output, log_total = ctx.saved_tensor()
        ring: Ring = ctx.ring
        values = (queries, output, log_total, _by_head(grad, queries.shape[1]))
        tiles = []
        for chunks in zip(*(ring.cut(value) for value in values)):
            for query_tile, *result_tiles in zip(*(chunk.tiles() for chunk in chunks)):
                results = (tile.values for tile in result_tiles)
                tiles.append(AttentionBackward(query_tile, *results))
        key_chunks = ring.cut(keys)
        totals: list[Tensor] = [_gradient_of_chunk(tiles, c, ring.causal) for c in key_chunks]
        for turn in ring.rounds():
            gradient = _gradient_of_chunk(tiles, ring.fetch(turn, key_chunks), ring.causal)
            returned = ring.give_back(turn, gradient)
            if returned is not None:
                totals[turn.chunk] = totals[turn.chunk] + returned
        keys_grad = paddle.concat(totals, axis=-2).transpose([0, 1, 3, 2, 4])
        query_grad = _by_position(paddle.concat([tile.grad for tile in tiles], axis=-2))
        grads = mask_untrained((query_grad, keys_grad[0], keys_grad[1]), ctx.trained)
        # Paddle expects a gradient for each tensor of the forward; documents have none.
        return *grads, *([None] if ctx.has_documents else [])


def mask_untrained(grads: Sequence[Tensor], trained: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Replaces the gradients of tensors that are not trained by None, as Paddle expects."""
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
        documents: Integers ``[rows, positions]``, or None if a query sees all keys. They are a
            tensor argument, since a captured model passes another tensor in each call.
        ranks: The ranks that share the sequences.
        causal: Whether a query sees only keys at its own position and before.
    """
    apply: Callable[..., Tensor] = _RingAttention.apply
    return apply(query, key, value, documents, ranks, causal)


def _add_chunk(queries: Sequence[OnlineSoftmax], chunk: Chunk | None, causal: bool) -> None:
    """Lets each tile of queries attend to a chunk of keys and values; None is no chunk."""
    for keys in () if chunk is None else chunk.tiles():
        for tile in queries:
            tile.add(keys, causal)


def _gradient_of_chunk(
    queries: Sequence[AttentionBackward], chunk: Chunk | None, causal: bool
) -> Tensor | None:
    """Returns what all queries contribute to the gradient of a chunk of keys and values."""
    if chunk is None:
        return None
    gradients = []
    for keys in chunk.tiles():
        total = paddle.zeros_like(keys.values)
        for tile in queries:
            added = tile.add(keys, causal)
            total = total if added is None else total + added
        gradients.append(total)
    return paddle.concat(gradients, axis=-2)


def _by_head(values: Tensor, heads: int) -> Tensor:
    """Groups the queries' heads by the heads of keys that they share.

    Turns ``[rows, positions, all heads, size]`` into ``[rows, heads of keys, heads for each,
    positions, size]``.
    """
    rows, length, all_heads, size = values.shape
    for_each = all_heads // heads
    return values.reshape([rows, length, heads, for_each, size]).transpose([0, 2, 3, 1, 4])


def _by_position(values: Tensor) -> Tensor:
    """Turns queries that :func:`_by_head` has grouped into ``[rows, positions, heads, size]``."""
    rows, heads, each, length, size = values.shape
    return values.transpose([0, 3, 1, 2, 4]).reshape([rows, length, heads * each, size])


def _split_documents(documents: Tensor | None, chunks: int) -> list[Tensor | None]:
    """Returns the documents of each chunk of a cp rank, or None for each chunk."""
    if documents is None:
        return [None] * chunks
    return [*paddle.split(documents, chunks, axis=-1)]
