"""Calls of Linear and of Embedding whose gradients are computed faster, with the same bits.

A call of Linear is three products: input gradient in I, gradients of weight and bias in W. The
gradients of a large table are added row by row, where Paddle makes and adds one of the size of the
table for each micro-batch.
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

#: Shapes of the input that are tried for each size of weight: where every batch has a length of its
#: own, to try them all would take longer than it saves.
_MOST_SHAPES = 8

#: Numbers of a weight from which one trial is enough; smaller ones may be equal by chance.
_ENOUGH = 2**8


class Way(NamedTuple):
    """Options with which products have the bits of autograd.

    Attributes:
        dtype: The dtype to which automatic casts convert the operands; None if they do not.
        ones: [rows]; the factor that makes the bias gradient a product; None if it is a sum.
    """

    dtype: DType
    ones: Tensor


#: What was tried, by what does not change with the batch, and then by the shape of the input.
_tried: dict[Hashable, dict[tuple[int, ...], Way | None]] = {}


class Product(NamedTuple):
    """A Linear whose calls can be products.

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
        # A forward may give the parameter other memory before I.
        self._then: Tensor = product.weight.detach()
        #: The input may have its own switched off once it was used.
        self._input_needs_grad = not taken.stop_gradient
        self._dtype = taken.dtype
        if product.way.dtype is not None:
            # What casts make of it is kept, as autograd keeps it.
            taken = _cast(taken.detach(), product.way.dtype)
        self._taken: Tensor | None = taken
        self._versions = taken.inplace_version, self._then.inplace_version

    def leave(self) -> tuple[Tensor, ...]:
        """Computes the output."""
        return (linear(self._taken, self._product.weight, self._product.bias),)

    def input_grads(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Returns the gradient of the input, if it needs one, and keeps the output's.

        Args:
            grads: The gradient of the output; None if it was unused.
        """
        taken = self._require_unchanged()
        self.arrived, (grad,) = grads, grads
        if not self._input_needs_grad:
            return []
        if grad is None:
            return [paddle.zeros_like(taken, self._dtype)]
        with uncast():  # as autograd runs
            way = self._product.way
            return [_restore_dtype(_back(grad, self._then, way), self._dtype, way)]

    def weight_grads(self) -> list[tuple[Tensor, Tensor]]:
        """Returns the parameters that have a gradient, each with it."""
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
    """Returns the product for a :class:`ProductCall` of ``leaf``; None if there can be none."""
    layer = leaf.layer
    if getattr(forward, "__func__", None) is not paddle.nn.Linear.forward:
        return None
    weight, bias, (x,) = layer.weight, layer.bias, taken
    trained = [parameter for parameter in leaf.parameters if not parameter.stop_gradient]
    if weight.stop_gradient or any(p is not weight and p is not bias for p in trained):
        return None
    if bias is not None and bias.shape != weight.shape[1:]:
        # Added to rows all the same; its gradient has its own shape.
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
    # What does not fit fails in the layer's own forward.
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
            # In half precision rounding hides another order from a trial, and not from a run.
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
        # What cancels out in a sum shows in which order it was made.
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


def _product(left: Tensor, right: Tensor, way: Way) -> Tensor:
    return product(_matrix(left), _matrix(_cast(right, way.dtype)), left_transposed=True)


def _back(grad: Tensor, weight: Tensor, way: Way) -> Tensor:
    return product(_cast(grad, way.dtype), _cast(weight, way.dtype), right_transposed=True)


def _column_sums(grad: Tensor, way: Way) -> Tensor:
    rows = _matrix(grad)
    return rows.sum(axis=0) if way.ones is None else product(way.ones, rows)


def _matrix(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim == 2 else reshape(tensor, [-1, tensor.shape[-1]])


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
