"""Replaces the ``forward`` of leaf layers by faster ones with the same bits, on CPUs.

They are Linears with a bias, whose gradient becomes a product, faster than Paddle's kernel, and
Embeddings with a large table, whose gradients are added in place. Start with ``FastForwards``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np

from fleetpipe.aliases import Context, DType, Layer, Tensor
from fleetpipe.compare.differences import same_bits
from fleetpipe.dygraph.backward import recompute
from fleetpipe.dygraph.backward.added_gradients import Sums, count_own_hook, is_watched
from fleetpipe.dygraph.backward.linear_and_embedding import (
    add_gradient,
    has_large_table,
    look_up,
    sum_rows,
)
from fleetpipe.dygraph.backward.split import Forward, with_forwards
from fleetpipe.paddle_api import eager_operations, paddle
from fleetpipe.paddle_api.amp import casts_automatically
from fleetpipe.paddle_api.device import device_kind
from fleetpipe.paddle_api.tensor import CAN_RUN_REDUCE_HOOKS, saves_freely

#: The bias's gradient is the sum of the output's gradient over rows. From so many elements of the
#: output, and so many columns, on a product with ones is faster than Paddle's kernel for sums.
_LEAST_SIZE, _LEAST_COLUMNS = 2**15, 256

#: The most row counts that are tried for each size of weight: if every batch has another length,
#: trying all of them takes longer than it saves.
_MOST_ROW_COUNTS = 8

#: By size and dtype of the weight, then by row count: whether both ways had the same bits.
_results: dict[tuple[int, int, DType], dict[int, bool]] = {}

#: The sizes that wait to be tried: row count, and size and dtype of the weight.
_untried: set[tuple[int, int, int, DType]] = set()

#: All kinds of numbers are tried in at most so many columns, since each column has its own sum.
_MOST_TRIED_COLUMNS = 1024

plain_linear_forward: Callable[[Layer, Tensor], Tensor] = paddle.nn.Linear.forward
plain_linear: Callable[..., Tensor] = paddle.nn.functional.linear

#: The dtypes with a faster way, and NumPy's names of them.
DTYPES: dict[DType, Any] = {paddle.float32: np.float32, paddle.float64: np.float64}

plain_embedding_forward: Callable[[Layer, Tensor], Tensor] = paddle.nn.Embedding.forward


def fast_linear_forward(layer: Layer, input: Tensor) -> Tensor:
    """Replaces ``paddle.nn.Linear.forward``: the same result with a faster backward.

    Args:
        layer: A Linear.
        input: [.., inputs]; the name is Paddle's, since callers may pass it by name.
    """
    x, weight, bias = input, layer.weight, layer.bias
    if bias is None or bias.stop_gradient or not paddle.is_grad_enabled():
        return plain_linear_forward(layer, x)
    if bias.shape != weight.shape[1:]:
        # A bias of another shape is broadcast, and its gradient has its own shape.
        return plain_linear_forward(layer, x)
    *lengths, inputs = x.shape
    rows, columns = math.prod(lengths), weight.shape[1]
    if columns < _LEAST_COLUMNS or rows * columns < _LEAST_SIZE:
        return plain_linear_forward(layer, x)
    if not x.dtype == weight.dtype == bias.dtype or casts_automatically():
        return plain_linear_forward(layer, x)
    if not _has_same_bits(rows, inputs, weight):
        return plain_linear_forward(layer, x)
    return _linear_by_products(x, weight, bias)


def _linear_by_products(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns ``x @ weight + bias`` whose backward computes the bias's gradient by a product."""
    repeat: Callable[..., Tensor] = _RepeatRows.apply
    output = eager_operations.product(x, weight)
    return eager_operations.total(output, repeat(bias, output.shape))


class _RepeatRows(paddle.autograd.PyLayer):
    """Repeats a vector in every row; the backward sums over rows by a product with ones.

    No tensor is saved, and the function can be differentiated twice. The sum of the bias and the
    product is no part of this PyLayer, since Paddle ignores hooks on the output of a PyLayer.
    """

    @staticmethod
    def forward(ctx: Context, vector: Tensor, shape: Sequence[int]) -> Tensor:
        return eager_operations.expand(vector, shape)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        rows = eager_operations.reshape(grad, [-1, grad.shape[-1]])
        ones = _ones(rows.shape[0], rows.dtype)
        return eager_operations.reshape(eager_operations.product(ones, rows), [-1])


@functools.lru_cache(maxsize=64)
def _ones(rows: int, dtype: DType) -> Tensor:
    return paddle.ones([1, rows], dtype)


def _has_same_bits(rows: int, inputs: int, weight: Tensor) -> bool:
    """Returns whether Paddle's Linear and the fast one have the same bits for these sizes.

    Each combination of sizes is tried once.

    Args:
        rows: Rows of the input.
        inputs: Columns of the input.
        weight: [inputs, columns].
    """
    size = (inputs, weight.shape[1], weight.dtype)
    by_rows = _results.setdefault(size, {})
    if rows not in by_rows:
        if len(by_rows) >= _MOST_ROW_COUNTS or device_kind() != "cpu":
            return False
        if weight.dtype not in DTYPES:
            return False
        if not saves_freely():
            _untried.add((rows, *size))
            return False
        by_rows[rows] = _try_sizes(rows, *size)
    return by_rows[rows]


def try_untried() -> None:
    """Tries the sizes that were first used within recompute, where nothing can be tried."""
    while _untried:
        rows, *size = _untried.pop()
        _results[tuple(size)][rows] = _try_sizes(rows, *size)


def _try_sizes(rows: int, inputs: int, columns: int, dtype: DType) -> bool:
    """Tries whether Paddle's Linear and the fast one have the same bits; returns the outcome.

    Args:
        rows: Rows of the input.
        inputs: Columns of the input.
        columns: Columns of the output.
        dtype: The dtype of all tensors.
    """
    sizes = (rows, inputs), (inputs, columns), (rows, columns)
    x, weight, grad = (next(matrices(size, dtype)) for size in sizes)
    few = min(columns, _MOST_TRIED_COLUMNS)
    return _has_same_sums(rows, few, dtype) and same_results(
        plain_linear, _linear_by_products, (x, weight, grad[0]), grad
    )


@functools.lru_cache(maxsize=64)
def _has_same_sums(rows: int, columns: int, dtype: DType) -> bool:
    """Tries whether a product gives the bits of the bias's gradient, with all kinds of numbers."""
    return all(
        same_results(plain_linear, _linear_by_products, (grad[:, :1], grad[:1], grad[-1]), grad)
        for grad in matrices((rows, columns), dtype)
    )


def matrices(shape: tuple[int, int], dtype: DType) -> Iterator[Tensor]:
    """Yields twenty test matrices: usual numbers, all kinds of unusual ones, and views.

    A caller with a large weight takes the first matrix alone.

    Args:
        shape: Rows and columns.
        dtype: One of ``DTYPES``.
    """
    generator, limits = np.random.default_rng(0), np.finfo(DTYPES[dtype])
    rows, columns = shape
    usual = generator.standard_normal(shape, DTYPES[dtype])
    yield paddle.to_tensor(usual)
    other = usual[::-1, ::-1].copy()
    positive, rare = other > 0, generator.random(shape) < 1 / (4 * rows)
    zeros = np.where(positive, 0.0, -0.0)
    values = [other, usual * usual, usual * other, other**9, usual - usual[0], -usual]
    values += [usual * 1e30, usual * 1e-30, usual * limits.tiny / 4, usual * (limits.max / 8)]
    values += [zeros, np.abs(zeros), -np.abs(zeros), np.where(positive, usual, -0.0)]
    values += [np.where(rare, special, usual) for special in (np.inf, np.nan)]
    for value in values:
        yield paddle.to_tensor(value.astype(DTYPES[dtype]))
    wide = paddle.zeros([rows + 1, columns + 1], dtype)
    wide[1:, 1:] = paddle.to_tensor(usual)
    yield from (paddle.to_tensor(usual.T.copy()).t(), wide[1:, 1:], wide[:-1, :-1])


def same_results(
    plain: Callable[..., Tensor],
    other: Callable[..., Tensor],
    operands: Sequence[Tensor],
    grad: Tensor,
) -> bool:
    """Returns whether two functions have the same bits in their outputs and in all gradients.

    Args:
        plain: The function that autograd differentiates.
        other: The function that is compared with it.
        operands: The arguments of both.
        grad: The gradient of their outputs.
    """
    results = []
    for function in (plain, other):
        leaves = [operand.detach() for operand in operands]
        for leaf in leaves:
            leaf.stop_gradient = False
        with paddle.amp.auto_cast(enable=False), paddle.enable_grad():
            output = function(*leaves)
            results.append([output, *paddle.grad(output, leaves, grad)])
    return all(map(same_bits, *results))


class LookupTable:
    """The table of one Embedding, with the gradients of the look-ups in a backward."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        #: Whether nothing but look-ups gives the table a gradient; None before the first backward.
        self._is_only_use: bool | None = None
        #: The ids of each look-up and the gradient of its output; None outside of :meth:`adding`.
        self.calls: list[tuple[Tensor, Tensor]] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Computes what ``paddle.nn.Embedding.forward`` does."""
        layer, weight = self._layer, self._layer.weight
        if weight.stop_gradient or not paddle.is_grad_enabled() or recompute.is_in_piece():
            return plain_embedding_forward(layer, x)
        if not has_large_table(layer) or not x.size:
            return plain_embedding_forward(layer, x)
        apply: Callable[..., Tensor] = _LookUp.apply
        # Paddle ignores hooks on the output of a PyLayer, but not on that of the reshape.
        output = apply(weight, x.detach().clone(), self)
        return eager_operations.reshape(output, output.shape)

    @contextmanager
    def adding(self, sums: Sums) -> Iterator[None]:
        """Returns a context for a stage's backward, whose end adds the look-ups' gradients.

        Args:
            sums: The sums of gradients.
        """
        weight = self._layer.weight
        if self._is_only_use is False or weight.stop_gradient or is_watched(weight):
            yield
            return
        if self._is_only_use is None and weight.grad is not None:
            yield
            return
        other_gradients: list[bool] = []

        def note_gradient(grad: Tensor | None) -> None:
            if grad is not None:
                other_gradients.append(True)

        hook = weight.register_hook(note_gradient)
        calls: list[tuple[Tensor, Tensor]] = []
        self.calls = calls
        try:
            yield
        finally:
            self.calls = None
            hook.remove()
            count_own_hook(weight)
        if calls:
            self._is_only_use = not other_gradients
            _add_lookups(weight, calls, sums)


class _LookUp(paddle.autograd.PyLayer):
    """Looks up the rows of some ids; backward stores the gradient in ``LookupTable.calls``."""

    @staticmethod
    def forward(ctx: Context, weight: Tensor, ids: Tensor, table: LookupTable) -> Tensor:
        ctx.weight, ctx.ids, ctx.table = weight, ids, table
        return look_up(ids, weight)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        if ctx.table.calls is None:
            return sum_rows(ctx.ids, grad, ctx.weight.detach())
        ctx.table.calls.append((ctx.ids, grad))
        return None


def _add_lookups(weight: Tensor, calls: list[tuple[Tensor, Tensor]], sums: Sums) -> None:
    """Adds the gradients of a table's look-ups to the table's sum, in the order of the calls.

    Args:
        weight: The table.
        calls: The ids of each look-up, and the gradient of its output.
        sums: The sums of gradients.
    """
    with paddle.no_grad():
        if len(calls) == 1:
            add_gradient(sums, weight, *calls[0])
            return
        total, *rest = (sum_rows(ids, grad, weight) for ids, grad in calls)
        for gradient in rest:
            total = total + gradient
        sums.add([(weight, total)])


class FastForwards:
    """The leaf layers of a stage that have a faster forward."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        #: Each layer with the forward of its class and the faster one.
        self.forwards: list[tuple[Layer, object, Forward]] = []
        self._tables: list[LookupTable] = []
        for layer in layers:
            plain = type(layer).forward
            if plain is plain_linear_forward and layer.bias is not None:
                fast = functools.partial(fast_linear_forward, layer)
                # With fewer columns the product is faster for no number of rows.
                if layer.weight.shape[1] >= _LEAST_COLUMNS:
                    self.forwards.append((layer, plain, fast))
            elif plain is plain_embedding_forward and CAN_RUN_REDUCE_HOOKS:
                table = LookupTable(layer)
                if has_large_table(layer):
                    self._tables.append(table)
                    self.forwards.append((layer, plain, table.forward))

    def running(self) -> AbstractContextManager[None]:
        """In this context, layers use the fast forward, unless a user replaced ``forward``."""
        try_untried()
        return with_forwards(
            [
                (layer, forward)
                for layer, plain, forward in self.forwards
                if type(layer).forward is plain and "forward" not in vars(layer)
            ]
        )

    @contextmanager
    def in_backward(self, sums: Sums) -> Iterator[None]:
        """In this context, the stage's backward runs with the fast forwards.

        Args:
            sums: The sums to which the gradients of look-ups are added.
        """
        with self.running(), ExitStack() as stack:
            for table in self._tables:
                stack.enter_context(table.adding(sums))
            yield


def fast_forwards_of(layers: Iterable[Layer]) -> FastForwards | None:
    """Returns the leaf layers of a stage that have a faster forward; None if there are none."""
    fast = FastForwards(layers)
    return fast if fast.forwards else None
