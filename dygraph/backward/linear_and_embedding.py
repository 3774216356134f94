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
from fleetpipe.paddle_api.amp import (
    casts_automatically,
    casts_of_now,
    rehearsal_dtype,
    without_casts,
)
from fleetpipe.paddle_api.device import device_kind
from fleetpipe.paddle_api.eager_operations import linear, product, reshape
from fleetpipe.paddle_api.tensor import run_reduce_hooks, to_host

_FULL_DTYPES: tuple[DType, ...] = (paddle.float32, paddle.float64)
_HALF_DTYPES: tuple[DType, ...] = (paddle.float16, paddle.bfloat16)

#: At most so many shapes of the input are tried for each size of weight: if every batch has
#: another length, trials would take longer than they save.
_MOST_SHAPES = 8

#: The number of elements of a weight from which one trial is enough: the results of small products
#: may be equal by chance.
_SIZE_FOR_ONE_TRIAL = 2**8

#: The method that trials have found, None for none: by the sizes of the weight, the dtypes and
#: the automatic casts, and then by the shape of the input.
_tried: dict[Hashable, dict[tuple[int, ...], ProductMethod | None]] = {}

#: The number of elements of an embedding table from which adding rows takes less time than adding
#: whole gradients.
FEWEST = 2**19

#: The dtypes of tables to whose gradients rows are added.
_TABLE_DTYPES = (paddle.float32, paddle.float64)

# Paddle's functions, here with types.
look_up: Callable[..., Tensor] = paddle.nn.functional.embedding
_add_into_rows: Callable[..., Tensor] = paddle.scatter
_find_distinct: Callable[..., tuple[Tensor, Tensor]] = paddle.unique


class ProductMethod(NamedTuple):
    """How to compute the gradients of a Linear as products, with the bits of autograd.

    Attributes:
        dtype: The dtype to which automatic casts convert the operands; None without casts.
        ones: Ones [rows], if the bias gradient is a product with them; None if it is a sum.
    """

    dtype: DType
    ones: Tensor


class Product(NamedTuple):
    """The parameters of a Linear whose gradients can be computed as products.

    Attributes:
        weight: [inputs, outputs].
        bias: [outputs], or None.
        trained: The parameters that need a gradient, the weight among them.
        method: How to compute the products.
    """

    weight: Tensor
    bias: Tensor
    trained: list[Tensor]
    method: ProductMethod


class ProductCall(Call):
    """A call of Linear without a graph: it keeps the input, and after I the output's gradient."""

    def __init__(self, leaf: Leaf, product: Product, value: Tensor) -> None:
        """Describes a call of ``leaf`` with the argument ``value``, [.., inputs]."""
        super().__init__(leaf, product.trained, ())
        self._product = product
        #: The weight as the forward used it; later the parameter may have other memory.
        self._weight_in_forward: Tensor = product.weight.detach()
        #: Stored, because stop_gradient of the input may change after its use.
        self._input_needs_grad = not value.stop_gradient
        self._dtype = value.dtype
        if product.method.dtype is not None:
            # The result of the cast is kept, as autograd keeps it.
            value = _cast(value.detach(), product.method.dtype)
        self._input: Tensor | None = value
        self._versions = value.inplace_version, self._weight_in_forward.inplace_version

    def take_outputs(self) -> tuple[Tensor, ...]:
        """Computes the output, [.., outputs]."""
        return (linear(self._input, self._product.weight, self._product.bias),)

    def input_grads(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Computes the gradient of the input, if it needs one; keeps that of the output.

        Args:
            grads: The gradient of the output; None if it was unused.
        """
        value = self._require_unchanged()
        self.output_grads, (grad,) = grads, grads
        if not self._input_needs_grad:
            return []
        if grad is None:
            return [paddle.zeros_like(value, self._dtype)]
        with without_casts():  # as autograd does
            method = self._product.method
            return [
                _restore_dtype(
                    _input_gradient(grad, self._weight_in_forward, method), self._dtype, method
                )
            ]

    def weight_grads(self) -> list[tuple[Tensor, Tensor]]:
        """Computes the gradients of the weight and the bias from the kept gradient."""
        value, self._input = self._require_unchanged(), None
        (grad,), self.output_grads = self.output_grads, ()
        if grad is None:
            return []
        weight, bias, trained, method = self._product
        with without_casts():
            of_weight = (
                weight,
                _restore_dtype(_weight_gradient(value, grad, method), weight.dtype, method),
            )
            if len(trained) == 1:
                return [of_weight]
            return [
                (bias, _restore_dtype(_bias_gradient(grad, method), bias.dtype, method)),
                of_weight,
            ]

    def _require_unchanged(self) -> Tensor:
        """Returns the input; refuses an input or weight that changed in place since the forward."""
        value = self._input
        if value is None:
            raise RuntimeError("backward ran twice through a call of a leaf layer")
        if (value.inplace_version, self._weight_in_forward.inplace_version) != self._versions:
            raise RuntimeError("the input or the weight of a Linear was changed in place before W")
        return value


def product_of(
    leaf: Leaf, forward: Callable[..., Nest], tensors: Sequence[Tensor]
) -> Product | None:
    """Returns the :class:`Product` of a call of a Linear; None if the call must keep its graph.

    Args:
        leaf: A leaf layer of any class.
        forward: Its forward.
        tensors: The tensors among the call's arguments.
    """
    layer = leaf.layer
    if getattr(forward, "__func__", None) is not paddle.nn.Linear.forward:
        return None
    weight, bias, (x,) = layer.weight, layer.bias, tensors
    trained = [parameter for parameter in leaf.parameters if not parameter.stop_gradient]
    if weight.stop_gradient or any(p is not weight and p is not bias for p in trained):
        return None
    if bias is not None and bias.shape != weight.shape[1:]:
        # A bias of another shape is broadcast, and its gradient is not a sum over rows.
        return None
    casts, dtype, weight_dtype = casts_of_now(), x.dtype, weight.dtype
    if casts is not None:
        half: DType = getattr(paddle, casts.dtype)
        if not {dtype, weight_dtype} <= {half, paddle.float32}:
            return None
        dtype = half
    elif dtype != weight_dtype:
        return None
    if dtype not in _FULL_DTYPES and (
        dtype not in _HALF_DTYPES or (device_kind() == "cpu" and not rehearsal_dtype())
    ):
        return None
    # Shapes that do not fit raise an error in the layer's own forward.
    if x.shape[-1:] != weight.shape[:-1] or not math.prod(x.shape) * weight.shape[-1]:
        return None
    method = _choose_method([x, weight] if bias is None else [x, weight, bias], dtype, casts)
    return None if method is None else Product(weight, bias, trained, method)


def _choose_method(
    operands: Sequence[Tensor], dtype: DType, casts: Hashable
) -> ProductMethod | None:
    """Returns how products have autograd's bits; None if no method has passed the trials.

    The trials for each shape run once, and their result is stored.

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
        methods = [ProductMethod(dtype if casts else None, None)]
        if len(operands) == 3 and dtype in _FULL_DTYPES:
            # In half precision, rounding may hide another order of sums in a trial.
            methods.insert(0, methods[0]._replace(ones=paddle.ones([math.prod(shape[:-1])], dtype)))
        seeds = range(1 + _SIZE_FOR_ONE_TRIAL // math.prod(operands[1].shape))
        passed = (
            method for method in methods if all(_try(operands, method, seed) for seed in seeds)
        )
        tried[shape] = next(passed, None)
    return tried[shape]


def _try(operands: Sequence[Tensor], method: ProductMethod, seed: int = 0) -> bool:
    """Whether products of random numbers have the bits of autograd's gradients.

    Args:
        operands: Tensors with the shapes and dtypes of the call's operands.
        method: How to compute the products.
        seed: The seed of the random numbers.
    """
    generator = np.random.default_rng(seed)

    def draw(shape: Sequence[int], dtype: DType) -> Tensor:
        """Returns random numbers of which many cancel out in sums."""
        rows = generator.standard_normal((math.prod(shape[:-1]), shape[-1]))
        half = len(rows) // 2
        # Terms that cancel out show in which order a sum is computed.
        rows[half : 2 * half] = 2**-8 * rows[half : 2 * half] - rows[:half]
        return paddle.to_tensor(rows).astype(dtype).reshape(shape)

    plain: Callable[..., Tensor] = paddle.nn.functional.linear
    with paddle.no_grad():
        inputs = [draw(operand.shape, operand.dtype) for operand in operands]
    for tensor in inputs:
        tensor.stop_gradient = False
    with paddle.enable_grad():
        output = plain(*inputs)
        grad = draw(output.shape, output.dtype).detach()
        expected = paddle.grad(output, inputs, grad)
    with paddle.no_grad(), without_casts():
        x, weight = inputs[:2]
        got = [
            _input_gradient(grad, weight, method),
            _weight_gradient(_cast(x, method.dtype), grad, method),
        ]
        got += [_bias_gradient(grad, method)] * (len(inputs) == 3)
        equal = [
            (_cast(gradient, correct.dtype) == correct).all()
            for gradient, correct in zip(got, expected)
        ]
        return bool(to_host(paddle.stack(equal).all()))


def _cast(tensor: Tensor, dtype: DType) -> Tensor:
    """Returns a tensor in a dtype; None leaves the dtype as it is."""
    return tensor if dtype is None or tensor.dtype == dtype else tensor.astype(dtype)


def _restore_dtype(gradient: Tensor, dtype: DType, method: ProductMethod) -> Tensor:
    """Returns a gradient in ``dtype``, that of its tensor, if automatic casts have changed it."""
    return gradient if method.dtype is None else _cast(gradient, dtype)


def _weight_gradient(value: Tensor, grad: Tensor, method: ProductMethod) -> Tensor:
    """Returns the gradient of the weight, from the input and the gradient of the output."""
    return product(_as_matrix(value), _as_matrix(_cast(grad, method.dtype)), left_transposed=True)


def _input_gradient(grad: Tensor, weight: Tensor, method: ProductMethod) -> Tensor:
    """Returns the gradient of the input, from the gradient of the output."""
    return product(_cast(grad, method.dtype), _cast(weight, method.dtype), right_transposed=True)


def _bias_gradient(grad: Tensor, method: ProductMethod) -> Tensor:
    """Returns the gradient of the bias, from the gradient of the output."""
    rows = _as_matrix(grad)
    return rows.sum(axis=0) if method.ones is None else product(method.ones, rows)


def _as_matrix(tensor: Tensor) -> Tensor:
    """Returns a tensor with all axes but the last joined: [rows, columns]."""
    return tensor if tensor.ndim == 2 else reshape(tensor, [-1, tensor.shape[-1]])


def has_large_table(layer: Layer) -> bool:
    """Whether adding the gradient of an Embedding row by row is possible, and faster."""
    # Paddle 2.6.2 has only the first two.
    options = ("_padding_idx", "_sparse", "_max_norm", "_scale_grad_by_freq")
    values = [getattr(layer, name, None) for name in options]
    plain = all(value is None or value is False for value in values)
    weight = layer.weight
    large = weight.is_leaf and weight.size >= FEWEST and weight.dtype in _TABLE_DTYPES
    return bool(plain and large and device_kind() == "cpu" and not casts_automatically())


def sum_rows(ids: Tensor, grad: Tensor, table: Tensor) -> Tensor:
    """Returns the gradient of an embedding table; ``paddle.grad`` can differentiate it by ``grad``.

    The rows are added to zeros one after another, as in Paddle's kernel. The kernel itself would
    need a ``paddle.grad`` within a ``paddle.grad``, which ends the process (3.3.1).

    Args:
        ids: The ids that were looked up, of any shape [..].
        grad: The gradient of the vectors of these ids, [.., width].
        table: A tensor with the shape and dtype of the table, [rows, width].
    """
    rows, added = ids.reshape([-1]), grad.reshape([-1, table.shape[1]])
    return _add_into_rows(paddle.zeros_like(table), rows, added, overwrite=False)


def add_gradient(sums: Sums, weight: Tensor, ids: Tensor, grad: Tensor) -> None:
    """Adds the gradient of a table to that of earlier micro-batches, row by row if there is one.

    Args:
        sums: Adds gradients to parameters; autograd is off.
        weight: The table, [rows, width].
        ids: The ids that were looked up, of any shape [..].
        grad: The gradient of the vectors of these ids, [.., width].
    """
    total = sums.total(weight)
    if total is None:
        sums.add([(weight, sum_rows(ids, grad, weight))])
        return
    _add_rows(total, ids, grad)
    run_reduce_hooks(weight)


def _add_rows(total: Tensor, ids: Tensor, grad: Tensor) -> None:
    """Adds the gradient of the vectors of ``ids`` to those rows of ``total``, in place."""
    rows, indices = _find_distinct(ids.reshape([-1]), return_inverse=True)
    added = sum_rows(indices, grad, paddle.empty([len(rows), total.shape[1]], total.dtype))
    paddle.scatter_(total, rows, paddle.gather(total, rows) + added)


class LookupCall(Call):
    """A call of Embedding without a graph: it keeps the ids, and from I the output's gradient."""

    def __init__(self, leaf: Leaf, ids: Tensor) -> None:
        """Describes a call of an Embedding with some ids, of any shape."""
        self._weight = leaf.layer.weight
        super().__init__(leaf, [self._weight], ())
        # A copy: the script may write into the ids before W.
        self._ids = ids.detach().clone()

    def take_outputs(self) -> tuple[Tensor, ...]:
        """Computes the output, [.., width]."""
        return (look_up(self._ids, self._weight),)

    def input_grads(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Keeps the output's gradient, and returns no gradient, since ids have none.

        Args:
            grads: The gradient of the output; None if it was unused.
        """
        self.output_grads = grads
        return []

    def weight_grads(self) -> list[tuple[Tensor, Tensor]]:
        """Computes the gradient of the table from the kept gradient."""
        (grad,), self.output_grads = self.output_grads, ()
        return [] if grad is None else [(self._weight, sum_rows(self._ids, grad, self._weight))]

    def add_weight_grads(self, sums: Sums) -> None:
        """Adds the gradient of the table to its sum, row by row if that is possible."""
        (grad,), self.output_grads = self.output_grads, ()
        if grad is not None:
            add_gradient(sums, self._weight, self._ids, grad)


def looks_up(leaf: Leaf, forward: Callable[..., Nest], tensors: Sequence[Tensor]) -> bool:
    """Whether a call of a leaf layer can be a :class:`LookupCall`.

    Args:
        leaf: A leaf layer of any class.
        forward: Its forward.
        tensors: The tensors among the call's arguments.
    """
    is_embedding = getattr(forward, "__func__", None) is paddle.nn.Embedding.forward
    return is_embedding and has_large_table(leaf.layer) and bool(tensors[0].size)
