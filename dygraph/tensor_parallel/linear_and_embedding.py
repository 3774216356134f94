"""Linear layers that are cut by columns or by rows, and the embedding, as in arXiv:1909.08053.

A member is a rank that holds a shard of a layer. Each member of an embedding looks up the ids of
its rows of the table.
"""

from __future__ import annotations

from collections.abc import Callable

from fleetpipe.aliases import Attribute, PaddleGroup, Tensor
from fleetpipe.dygraph.tensor_parallel import operations
from fleetpipe.dygraph.tensor_parallel.layer import ParallelLayer
from fleetpipe.errors import UsageError
from fleetpipe.paddle_api import eager_operations, paddle


class _ParallelLinear(ParallelLayer):
    """The base of both linear layers; the ``mp_`` switches are Paddle's, without effect on CPU."""

    mp_async_allreduce = False
    mp_skip_c_identity = False
    mp_fused_linear_param_grad_add = False

    def __init__(
        self,
        weight_attr: Attribute,
        fuse_matmul_bias: bool,
        mp_group: PaddleGroup,
        name: str | None,
    ) -> None:
        """Stores the arguments that ColumnParallelLinear and RowParallelLinear have in common."""
        super().__init__(mp_group)
        self._weight_attr = weight_attr
        self._name = name
        self.fuse_matmul_bias = fuse_matmul_bias
        self.linear: Callable[..., Tensor] = paddle.nn.functional.linear

    def _require_layout(self) -> None:
        """Called before parameters are created: a subclass refuses unsupported options."""


class ColumnParallelLinear(_ParallelLinear):
    """Computes ``x @ weight + bias``; each member computes some of the columns."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        weight_attr: Attribute = None,
        has_bias: bool | None = None,
        gather_output: bool = True,
        fuse_matmul_bias: bool = False,
        mp_group: PaddleGroup = None,
        name: str | None = None,
    ) -> None:
        """Creates this member's columns; not collective.

        Args:
            in_features: The size of the last axis of the input.
            out_features: The size of the last axis of the whole output.
            weight_attr: The attribute of the whole weight ``[in_features, out_features]``.
            has_bias: Whether to add a bias, initially zero; None means no.
            gather_output: Whether each member returns the whole output, or only its columns.
            fuse_matmul_bias: Accepted; without effect on CPU.
            mp_group: Paddle's group of the members; by default the group of ``fleet.init``.
            name: The name of the output, as in ``nn.Linear``.

        Raises:
            ConfigError: The number of members does not divide ``out_features``.
        """
        super().__init__(weight_attr, fuse_matmul_bias, mp_group, name)
        self.gather_output = gather_output
        self._require_layout()
        self.output_size_per_partition = self.share_of(out_features, "out_features")
        self.weight = self.create_shard([in_features, out_features], 1, weight_attr)
        self.bias = self.create_bias(self.output_size_per_partition, True) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``x @ weight + bias``, whole or this member's columns.

        Collective if the output is gathered, and in backward if ``x`` needs a gradient.

        Args:
            x: ``[.., in_features]``, the same on every member.

        Returns:
            ``[.., out_features]`` on every member, or this member's columns of it.
        """
        output = self._local_product(self._full_input(x))
        if self.gather_output:
            return operations.gather(output, self.model_parallel_group)
        return output

    def _local_product(self, x: Tensor) -> Tensor:
        """Returns this member's columns of the output; ``x`` is the input, [.., in_features]."""
        count = self.count_blocks()
        if not count:
            return self.linear(x, self.weight, self.bias, name=self._name)
        output = operations.column_product(x, self.weight, count)
        return output if self.bias is None else eager_operations.total(output, self.bias)

    def _full_input(self, x: Tensor) -> Tensor:
        """Returns the input, which every member multiplies by its columns of the weight."""
        return operations.identity(x, self.model_parallel_group)


class RowParallelLinear(_ParallelLinear):
    """Computes ``x @ weight + bias`` as a sum; each member has some rows of the weight."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        weight_attr: Attribute = None,
        has_bias: bool = True,
        input_is_parallel: bool = False,
        fuse_matmul_bias: bool = False,
        mp_group: PaddleGroup = None,
        name: str | None = None,
    ) -> None:
        """Creates this member's rows; not collective.

        Args:
            in_features: The size of the last axis of the whole input.
            out_features: The size of the last axis of the output.
            weight_attr: The attribute of the whole weight ``[in_features, out_features]``.
            has_bias: Whether to add a bias, initially zero, which every member holds whole.
            input_is_parallel: Whether the input of a member has only the member's columns.
            fuse_matmul_bias: Accepted; without effect on CPU.
            mp_group: Paddle's group of the members; by default the group of ``fleet.init``.
            name: The name of the output, as in ``nn.Linear``.

        Raises:
            ConfigError: The number of members does not divide ``in_features``.
        """
        super().__init__(weight_attr, fuse_matmul_bias, mp_group, name)
        self.in_features = in_features
        self.out_features = out_features
        self.input_is_parallel = input_is_parallel
        self._require_layout()
        self.input_size_per_partition = self.share_of(in_features, "in_features")
        self.weight = self.create_shard([in_features, out_features], 0, weight_attr)
        self.bias = self.create_bias(out_features, False) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``x @ weight + bias``: the sum of the members' products. Collective.

        Collective in backward too, if ``x`` is whole and needs a gradient.

        Args:
            x: ``[.., in_features]``, or this member's shard of the last axis if
                ``input_is_parallel``.

        Returns:
            ``[.., out_features]``, with the same bits on every member.

        Raises:
            UsageError: The last axis of ``x`` has another size.
        """
        count = self.count_blocks()
        if not self.is_mp and not count:
            return self.linear(x, self.weight, self.bias, name=self._name)
        self._require_width(x)
        columns = x if self.input_is_parallel else operations.split(x, self.model_parallel_group)
        output = self._sum_over_members(self._local_product(columns, count))
        return output if self.bias is None else output + self.bias

    def _local_product(self, columns: Tensor, count: int) -> Tensor:
        """Returns the product of this member's columns of the input and its rows of the weight.

        Args:
            columns: This member's shard of the last axis of the input.
            count: How many blocks of rows to multiply separately and add by a tree, so that the
                bits do not depend on the number of members; 0 for one plain product.
        """
        if not count:
            return self.linear(columns, self.weight, name=self._name)
        return operations.row_product(columns, self.weight, count)

    def _sum_over_members(self, terms: Tensor) -> Tensor:
        """Returns the sum of the members' products, on every member. Collective."""
        return operations.all_reduce(terms, self.model_parallel_group)

    def _require_width(self, x: Tensor) -> None:
        """Refuses an input whose last axis has another size than the layer expects."""
        width = self.input_size_per_partition if self.input_is_parallel else self.in_features
        if x.shape[-1] != width:
            raise UsageError(
                f"the last axis of the input (={x.shape[-1]}) does not fit",
                where=f"RowParallelLinear with input_is_parallel={self.input_is_parallel}",
                expected=f"{width}, of in_features={self.in_features} on {self.world_size} members",
                cause="the layer before returns the whole output where a shard is expected, or the"
                " other way round",
                fix="set gather_output=False there and input_is_parallel=True here, or neither",
            )


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
            mp_group: Paddle's group of the members; by default the group of ``fleet.init``.
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
            # Several members add zeros, which makes 0.0 of -0.0; so one member does, too.
            return rows + paddle.zeros_like(rows) if count else rows
        refuse_unknown_ids(x, self.num_embeddings, "an id")
        rows = own_rows(self.weight, x, self.vocab_start_index)
        return operations.all_reduce(rows, self.model_parallel_group)


def own_rows(table: Tensor, ids: Tensor, start: int) -> Tensor:
    """Looks up ids in a shard of a table; an id of another shard gives a row of zeros.

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


def refuse_unknown_ids(ids: Tensor, size: int, name: str) -> None:
    """Refuses ids outside of the vocabulary.

    Args:
        ids: The ids.
        size: The size of the vocabulary.
        name: What an id is called in the error, such as "a label".
    """
    if ids.size == 0:
        return
    least, greatest = int(ids.min()), int(ids.max())
    if least < 0 or greatest >= size:
        raise UsageError(
            f"{name} (={least if least < 0 else greatest}) is not in the vocabulary",
            expected=f"ids from 0 to {size - 1}",
            fix="correct the data, or build the layers with a larger vocabulary",
        )
