"""Embeddings with large tables, whose gradients are added row by row, with the same bits.

Paddle makes a gradient of the size of the table for each micro-batch and adds all of it. With
50,000 rows of 256 numbers that takes longer than a block, though only some hundred rows are not
zero. Here a micro-batch's gradients of a row are summed as Paddle sums them, in a table of these
rows alone, and added to these rows of the sum. Adding zeros to the other rows would change no bit
of them: the first gradient of a batch is added as a whole, and after that no number of the sum is
-0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fleetpipe.aliases import Layer, Nest, Tensor
from fleetpipe.dygraph.backward.adding import Sums
from fleetpipe.dygraph.backward.leaf import Leaf
from fleetpipe.dygraph.backward.leaf_call import Call
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.amp import casts_automatically
from fleetpipe.paddle_api.device import device_kind
from fleetpipe.paddle_api.tensor import run_reduce_hooks

#: Numbers of a table from which rows take less time than the whole.
FEWEST = 2**19

_DTYPES = (paddle.float32, paddle.float64)

# Typed: Paddle's own are not.
look_up: Callable[..., Tensor] = paddle.nn.functional.embedding
_scatter: Callable[..., Tensor] = paddle.scatter
_distinct: Callable[..., tuple[Tensor, Tensor]] = paddle.unique


def has_large_table(layer: Layer) -> bool:
    """Whether single rows of an Embedding's table can be added, and faster than the whole."""
    # 2.6.2 has the first two alone.
    options = ("_padding_idx", "_sparse", "_max_norm", "_scale_grad_by_freq")
    values = [getattr(layer, name, None) for name in options]
    plain = all(value is None or value is False for value in values)
    weight = layer.weight
    large = weight.is_leaf and weight.size >= FEWEST and weight.dtype in _DTYPES
    return bool(plain and large and device_kind() == "cpu" and not casts_automatically())


def sum_rows(ids: Tensor, grad: Tensor, table: Tensor) -> Tensor:
    """Returns the gradient of a table, which can be differentiated with respect to ``grad``.

    The rows are added to zeros one after another, as Paddle's kernel does. That is not called,
    because ``paddle.grad`` within a ``paddle.grad`` ends the process (3.3.1).

    Args:
        ids: The ids of rows.
        grad: The gradient of these rows, [.., width].
        table: The table, or one of its shape and dtype.
    """
    rows, added = ids.reshape([-1]), grad.reshape([-1, table.shape[1]])
    return _scatter(paddle.zeros_like(table), rows, added, overwrite=False)


def add_gradient(sums: Sums, weight: Tensor, ids: Tensor, grad: Tensor) -> None:
    """Adds the gradient of a table; once there is a sum, only in the rows that have one.

    Args:
        sums: The gradients of the batch; autograd is off.
        weight: The table.
        ids: The ids of rows.
        grad: The gradient of these rows, [.., width].
    """
    total = sums.total(weight)
    if total is None:
        sums.add([(weight, sum_rows(ids, grad, weight))])
        return
    _add_rows(total, ids, grad)
    run_reduce_hooks(weight)


def _add_rows(total: Tensor, ids: Tensor, grad: Tensor) -> None:
    rows, places = _distinct(ids.reshape([-1]), return_inverse=True)
    added = sum_rows(places, grad, paddle.empty([len(rows), total.shape[1]], total.dtype))
    paddle.scatter_(total, rows, paddle.gather(total, rows) + added)


class LookupCall(Call):
    """A call of Embedding without a graph: it keeps the ids, and later the output's gradient."""

    def __init__(self, leaf: Leaf, ids: Tensor) -> None:
        self._weight = leaf.layer.weight
        super().__init__(leaf, [self._weight], ())
        # A copy: whoever has the ids may write into them before W.
        self._ids = ids.detach().clone()

    def leave(self) -> tuple[Tensor, ...]:
        """Computes the output, [.., width]."""
        return (look_up(self._ids, self._weight),)

    def input_grads(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Stores the gradient of the output, and returns nothing: ids have no gradient.

        Args:
            grads: The gradient of the output; None if it was unused.
        """
        self.arrived = grads
        return []

    def weight_grads(self) -> list[tuple[Tensor, Tensor]]:
        """Returns the table with its gradient."""
        (grad,), self.arrived = self.arrived, ()
        return [] if grad is None else [(self._weight, sum_rows(self._ids, grad, self._weight))]

    def add_weight_grads(self, sums: Sums) -> None:
        """Adds the gradient of the table to ``sums``."""
        (grad,), self.arrived = self.arrived, ()
        if grad is not None:
            add_gradient(sums, self._weight, self._ids, grad)


def looks_up(leaf: Leaf, forward: Callable[..., Nest], taken: Sequence[Tensor]) -> bool:
    """Whether a call of ``leaf`` can be a :class:`LookupCall`."""
    plain = getattr(forward, "__func__", None) is paddle.nn.Embedding.forward
    return plain and has_large_table(leaf.layer) and bool(taken[0].size)
