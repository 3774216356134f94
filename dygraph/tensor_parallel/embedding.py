"""An embedding cut by rows: each member looks up the ids of its part of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

from fleetpipe.aliases import Attribute, PaddleGroup, Tensor
from fleetpipe.dygraph.tensor_parallel import operations
from fleetpipe.dygraph.tensor_parallel.layer import ParallelLayer
from fleetpipe.errors import UsageError
from fleetpipe.paddle_api import paddle


class VocabParallelEmbedding(ParallelLayer):
    """An ``nn.Embedding`` of which each member holds an equal number of consecutive rows.

    Attributes:
        vocab_start_index: The id of this member's first row.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        weight_attr: Attribute = None,
        mp_group: PaddleGroup = None,
        name: str | None = None,
    ) -> None:
        """Creates this member's rows; not collective.

        Args:
            num_embeddings: The size of the whole vocabulary.
            embedding_dim: The size of each vector.
            weight_attr: The attribute of the whole weight ``[num_embeddings, embedding_dim]``.
            mp_group: Paddle's group of the members; by default the one of ``fleet.init``.
            name: The name of the output, as in ``nn.Embedding``.

        Raises:
            ConfigError: The number of members does not divide ``num_embeddings``.
        """
        super().__init__(mp_group)
        rows = self.share_of(num_embeddings, "num_embeddings", embedding_dim)
        self.origin_num_embeddings = num_embeddings
        self.num_embeddings = num_embeddings
        self.vocab_start_index = self.rank * rows
        self._size = [rows, embedding_dim]
        self._weight_attr = weight_attr
        self._name = name
        self.weight = self.create_shard([num_embeddings, embedding_dim], 0, weight_attr)

    def forward(self, x: Tensor) -> Tensor:
        """Looks up the vector of each id. Collective.

        Args:
            x: Ids, int32 or int64 of any shape, the same on every member.

        Returns:
            ``[.., embedding_dim]``, with the same bits on every member.

        Raises:
            UsageError: An id is not in the vocabulary.
        """
        look_up: Callable[..., Tensor] = paddle.nn.functional.embedding
        count = self.count_blocks()
        if not self.is_mp:
            rows = look_up(x, self.weight, name=self._name)
            # As among members, who add zeros: -0.0 becomes 0.0.
            return rows + paddle.zeros_like(rows) if count else rows
        refuse_outside(x, self.num_embeddings, "an id")
        rows = own_rows(self.weight, x, self.vocab_start_index)
        return operations.all_reduce(rows, self.model_parallel_group)


def own_rows(table: Tensor, ids: Tensor, start: int) -> Tensor:
    """Looks up ids in a shard of a table; ids of other shards give zeros.

    Args:
        table: ``[rows, width]``.
        ids: Ids in the whole table, of any shape.
        start: The id of the shard's first row.
    """
    look_up: Callable[..., Tensor] = paddle.nn.functional.embedding
    rows = ids - start
    elsewhere = paddle.logical_or(rows < 0, rows >= table.shape[0])
    vectors = look_up(paddle.where(elsewhere, paddle.zeros_like(rows), rows), table)
    # Not a product with 0: it would make NaN of an infinite gradient.
    mask = elsewhere.unsqueeze(-1).expand_as(vectors)
    return paddle.where(mask, paddle.zeros_like(vectors), vectors)


def refuse_outside(ids: Tensor, size: int, what: str) -> None:
    """Refuses ids outside of 0 to ``size`` - 1, which no member has."""
    if ids.size == 0:
        return
    least, greatest = int(ids.min()), int(ids.max())
    if least < 0 or greatest >= size:
        raise UsageError(
            f"{what} (={least if least < 0 else greatest}) is not in the vocabulary",
            expected=f"ids from 0 to {size - 1}",
            fix="correct the data, or build the layers with a larger vocabulary",
        )
