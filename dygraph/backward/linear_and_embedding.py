"""Calls of Linear and of Embedding whose gradients are computed faster, with the same bits.

The gradients of a Linear are products: the input gradient in I, the gradients of weight and bias in
W. The gradients of an Embedding with a large table are added row by row; Paddle would add a
gradient of the size of the table for each micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np

from fleetpipe.aliases import DType, Layer, Nest, Tensor
from fleetpipe.dygraph.backward.added_gradients import Sums
from fleetpipe.dygraph.backward.leaf import Leaf
from fleetpipe.dygraph.backward.leaf_call import Call
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.amp import casts_automatically, casts_of_now, rehearsal_dtype, uncast
from fleetpipe.paddle_api.device import device_kind
from fleetpipe.paddle_api.eager_operations import linear, product, reshape
from fleetpipe.paddle_api.tensor import run_reduce_hooks, to_host

_WIDE: tuple[DType, ...] = (paddle.float32, paddle.float64)
_HALF: tuple[DType, ...] = (paddle.float16, paddle.bfloat16)

#: The number of shapes of the input to try for each size of weight: if every batch has another
#: length, trials would take longer than they save.
_MOST_SHAPES = 8

#: The size of a weight from which one trial is enough: small products may be equal by chance.
_ENOUGH = 2**8

#: The results of trials, by sizes, dtypes and casts, and then by the shape of the input.
_tried: dict[Hashable, dict[tuple[int, ...], Way | None]] = {}

#: The size of a table from which adding rows takes less time than adding whole gradients.
FEWEST = 2**19

_DTYPES = (paddle.float32, paddle.float64)

# With types, which Paddle's own functions do not have.
look_up: Callable[..., Tensor] = paddle.nn.functional.embedding
_scatter: Callable[..., Tensor] = paddle.scatter
_distinct: Callable[..., tuple[Tensor, Tensor]] = paddle.unique


class Way(NamedTuple):
    """Options with which products have the bits of autograd.

    Attributes:
        dtype: The dtype to which automatic casts convert the operands; None without casts.
        ones: Ones [rows], if the bias gradient is a product with them; None if it is a sum.
    """

    dtype: DType
    ones: Tensor


class Product(NamedTuple):
    """A Linear whose gradients can be computed as products.

    Attributes:
        weight: [inputs, outputs].
        bias: [outputs], or None.
        trained: The parameters that need a gradient, the weight among them.
        way: The options of the products.
    """

    weight: Tensor
    bias: Tensor
    trained: list[Tensor]
    way: Way


class ProductCall(Call):
    """A call of Linear without a graph: it keeps the input, and later the output's gradient."""

    def __init__(self, leaf: Leaf, product: Product, taken: Tensor) -> None:
        super().__init__(leaf, product.trained, ())
        self._product = product
        #: The weight in the forward; later the parameter may have other memory.
        self._then: Tensor = product.weight.detach()
        #: Stored, because stop_gradient of the input may change after its use.
        self._input_needs_grad = not taken.stop_gradient
        self._dtype = taken.dtype
        if product.way.dtype is not None:
            # The result of the cast is kept, as autograd keeps it.
            taken = _cast(taken.detach(), product.way.dtype)
        self._taken: Tensor | None = taken
        self._versions = taken.inplace_version, self._then.inplace_version

    def leave(self) -> tuple[Tensor, ...]:
        """Computes the output."""
        return (linear(self._taken, self._product.weight, self._product.bias),)

    def input_grads(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Computes the gradient of the input, if it needs one, and keeps the output's gradient.

        Args:
            grads: The gradient of the output; None if it was unused.
        """
        taken = self._require_unchanged()
        self.arrived, (grad,) = grads, grads
        if not self._input_needs_grad:
            return []
        if grad is None:
            return [paddle.zeros_like(taken, self._dtype)]
        with uncast():  # as autograd does
            way = self._product.way
            return [_restore_dtype(_back(grad, self._then, way), self._dtype, way)]

    def weight_grads(self) -> list[tuple[Tensor, Tensor]]:
        """Computes the gradients of the weight and the bias."""
        taken, self._taken = self._require_unchanged(), None
        (grad,), self.arrived = self.arrived, ()
        if grad is None:
            return []
        weight, bias, trained, way = self._product
        with uncast():
            of_weight = weight, _restore_dtype(_product(taken, grad, way), weight.dtype, way)
            if len(trained) == 1:
                return [of_weight]
            return [(bias, _restore_dtype(_column_sums(grad, way), bias.dtype, way)), of_weight]

    def _require_unchanged(self) -> Tensor:
        """Returns the input, after a check that it is unchanged since the forward."""
        taken = self._taken
        if taken is None:
            raise RuntimeError("backward ran twice through a call of a leaf layer")
        if (taken.inplace_version, self._then.inplace_version) != self._versions:
            raise RuntimeError("the input or the weight of a Linear was changed in place before W")
        return taken


def product_of(leaf: Leaf, forward: Callable[..., Nest], taken: Sequence[Tensor]) -> Product | None:
    """Returns the product for a :class:`ProductCall` of ``leaf``; None if it must not be one."""
    layer = leaf.layer
    if getattr(forward, "__func__", None) is not paddle.nn.Linear.forward:
        return None
    weight, bias, (x,) = layer.weight, layer.bias, taken
    trained = [parameter for parameter in leaf.parameters if not parameter.stop_gradient]
    if weight.stop_gradient or any(p is not weight and p is not bias for p in trained):
        return None
    if bias is not None and bias.shape != weight.shape[1:]:
        # A bias of another shape is broadcast, and its gradient is not a sum over rows.
        return None
    casts, dtype, of_weight = casts_of_now(), x.dtype, weight.dtype
    if casts is not None:
        half: DType = getattr(paddle, casts.dtype)
        if not {dtype, of_weight} <= {half, paddle.float32}:
            return None
        dtype = half
    elif dtype != of_weight:
        return None
    if dtype not in _WIDE and (
        dtype not in _HALF or (device_kind() == "cpu" and not rehearsal_dtype())
    ):
        return None
    # Shapes that do not fit raise an error in the layer's own forward.
    if x.shape[-1:] != weight.shape[:-1] or not math.prod(x.shape) * weight.shape[-1]:
        return None
    way = _way([x, weight] if bias is None else [x, weight, bias], dtype, casts)
    return None if way is None else Product(weight, bias, trained, way)


def _way(operands: Sequence[Tensor], dtype: DType, casts: Hashable) -> Way | None:
    """Returns options with which products have autograd's bits, from one trial; None for none.

    Args:
        operands: The input, the weight, and the bias if there is one.
        dtype: The dtype in which the call computes.
        casts: The current automatic casts.
    """
    shape = tuple(operands[0].shape)
    kinds = [operand.dtype for operand in operands] if casts else [dtype] * len(operands)
    tried = _tried.setdefault((shape[-1], operands[1].shape[-1], *kinds, casts), {})
    if shape not in tried:
        if len(tried) >= _MOST_SHAPES:
            return None
        ways = [Way(dtype if casts else None, None)]
        if len(operands) == 3 and dtype in _WIDE:
            # In half precision, rounding may hide another order of sums in a trial.
            ways.insert(0, ways[0]._replace(ones=paddle.ones([math.prod(shape[:-1])], dtype)))
        draws = range(1 + _ENOUGH // math.prod(operands[1].shape))
        equal = (way for way in ways if all(_try(operands, way, seed) for seed in draws))
        tried[shape] = next(equal, None)
    return tried[shape]


def _try(operands: Sequence[Tensor], way: Way, seed: int = 0) -> bool:
    """Tests on random numbers whether products have autograd's bits.

    Args:
        operands: Tensors with the shapes and dtypes of the call's operands.
        way: The options of the products.
        seed: The seed of the random numbers.
    """
    generator = np.random.default_rng(seed)

    def draw(shape: Sequence[int], dtype: DType) -> Tensor:
        rows = generator.standard_normal((math.prod(shape[:-1]), shape[-1]))
        half = len(rows) // 2
        # Terms that cancel out show in which order a sum is computed.
        rows[half : 2 * half] = 2**-8 * rows[half : 2 * half] - rows[:half]
        return paddle.to_tensor(rows).astype(dtype).reshape(shape)

    plain: Callable[..., Tensor] = paddle.nn.functional.linear
    with paddle.no_grad():
        like = [draw(operand.shape, operand.dtype) for operand in operands]
    for tensor in like:
        tensor.stop_gradient = False
    with paddle.enable_grad():
        output = plain(*like)
        grad = draw(output.shape, output.dtype).detach()
        expected = paddle.grad(output, like, grad)
    with paddle.no_grad(), uncast():
        x, weight = like[:2]
        made = [_back(grad, weight, way), _product(_cast(x, way.dtype), grad, way)]
        made += [_column_sums(grad, way)] * (len(like) == 3)
        equal = [(_cast(one, other.dtype) == other).all() for one, other in zip(made, expected)]
        return bool(to_host(paddle.stack(equal).all()))


def _cast(tensor: Tensor, dtype: DType) -> Tensor:
    return tensor if dtype is None or tensor.dtype == dtype else tensor.astype(dtype)


def _restore_dtype(gradient: Tensor, dtype: DType, way: Way) -> Tensor:
    return gradient if way.dtype is None else _cast(gradient, dtype)


def _product(taken: Tensor, grad: Tensor, way: Way) -> Tensor:
    """Returns the gradient of the weight."""
    return product(_matrix(taken), _matrix(_cast(grad, way.dtype)), left_transposed=True)


def _back(grad: Tensor, weight: Tensor, way: Way) -> Tensor:
    """Returns the gradient of the input."""
    return product(_cast(grad, way.dtype), _cast(weight, way.dtype), right_transposed=True)


def _column_sums(grad: Tensor, way: Way) -> Tensor:
    """Returns the gradient of the bias."""
    rows = _matrix(grad)
    return rows.sum(axis=0) if way.ones is None else product(way.ones, rows)


def _matrix(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim == 2 else reshape(tensor, [-1, tensor.shape[-1]])


def has_large_table(layer: Layer) -> bool:
    """Whether the gradient of an Embedding can be added row by row, and faster so."""
    # Paddle 2.6.2 has only the first two.
    options = ("_padding_idx", "_sparse", "_max_norm", "_scale_grad_by_freq")
    values = [getattr(layer, name, None) for name in options]
    plain = all(value is None or value is False for value in values)
    weight = layer.weight
    large = weight.is_leaf and weight.size >= FEWEST and weight.dtype in _DTYPES
    return bool(plain and large and device_kind() == "cpu" and not casts_automatically())


def sum_rows(ids: Tensor, grad: Tensor, table: Tensor) -> Tensor:
    """Returns the gradient of a table, which can be differentiated with respect to ``grad``.

    The rows are added to zeros one after another, as in Paddle's kernel. The kernel itself would
    need a ``paddle.grad`` within a ``paddle.grad``, which ends the process (3.3.1).

    Args:
        ids: The ids of rows.
        grad: The gradient of these rows, [.., width].
        table: A tensor with the shape and dtype of the table.
    """
    rows, added = ids.reshape([-1]), grad.reshape([-1, table.shape[1]])
    return _scatter(paddle.zeros_like(table), rows, added, overwrite=False)


def add_gradient(sums: Sums, weight: Tensor, ids: Tensor, grad: Tensor) -> None:
    """Adds the gradient of a table to ``sums``; to an earlier sum it adds only the rows ``ids``.

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
    """Adds a gradient to the rows ``ids`` of the sum ``total``, in place."""
    rows, indices = _distinct(ids.reshape([-1]), return_inverse=True)
    added = sum_rows(indices, grad, paddle.empty([len(rows), total.shape[1]], total.dtype))
    paddle.scatter_(total, rows, paddle.gather(total, rows) + added)


class LookupCall(Call):
    """A call of Embedding without a graph: it keeps the ids, and later the output's gradient."""

    def __init__(self, leaf: Leaf, ids: Tensor) -> None:
        self._weight = leaf.layer.weight
        super().__init__(leaf, [self._weight], ())
        # A copy: the script may write into the ids before W.
        self._ids = ids.detach().clone()

    def leave(self) -> tuple[Tensor, ...]:
        """Computes the output, [.., width]."""
        return (look_up(self._ids, self._weight),)

    def input_grads(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Keeps the output's gradient, and returns no gradient: ids have none.

        Args:
            grads: The gradient of the output; None if it was unused.
        """
        self.arrived = grads
        return []

    def weight_grads(self) -> list[tuple[Tensor, Tensor]]:
        """Computes the gradient of the table."""
        (grad,), self.arrived = self.arrived, ()
        return [] if grad is None else [(self._weight, sum_rows(self._ids, grad, self._weight))]

    def add_weight_grads(self, sums: Sums) -> None:
        """Adds the gradient of the table to ``sums``, row by row if that is possible."""
        (grad,), self.arrived = self.arrived, ()
        if grad is not None:
            add_gradient(sums, self._weight, self._ids, grad)


def looks_up(leaf: Leaf, forward: Callable[..., Nest], taken: Sequence[Tensor]) -> bool:
    """Whether a call of ``leaf`` can be a :class:`LookupCall`."""
    plain = getattr(forward, "__func__", None) is paddle.nn.Embedding.forward
    return plain and has_large_table(leaf.layer) and bool(taken[0].size)
