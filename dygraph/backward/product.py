"""A call of Linear as three products: of the input's gradient in I, of weight's and bias's in W.

The bias's, as a product with ones, takes a tenth of the time of the sum that Paddle's kernels make.
Whether any of them has the bits of autograd depends on the sizes, as products are made in blocks;
it is tried out once for each.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, Callable, NamedTuple

import numpy as np

from fleetpipe.aliases import DType, Nest, Tensor
from fleetpipe.dygraph.backward.leaf import Leaf
from fleetpipe.dygraph.backward.leaf_call import Call
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.amp import casts_automatically
from fleetpipe.paddle_api.kernels import linear, product, reshaped
from fleetpipe.paddle_api.tensor import tensor_bytes

_DTYPES: dict[DType, Any] = {paddle.float32: np.float32, paddle.float64: np.float64}

#: Shapes of the input that are tried for each size of weight: where every batch has a length of its
#: own, to try them all would take longer than it saves.
_MOST_SHAPES = 8

#: Numbers of a weight from which one trial is enough; smaller ones may be equal by chance.
_ENOUGH = 2**8

#: What was tried, by what does not change with the batch, and then by the shape of the input.
_tried: dict[Hashable, dict[tuple[int, ...], Tensor | None]] = {}


class Product(NamedTuple):
    """A Linear whose calls can be products.

    Attributes:
        weight: [inputs, outputs].
        bias: [outputs], or None.
        trained: The parameters that need a gradient, the weight among them.
        ones: [rows]; the factor that makes the bias's gradient a product.
    """

    weight: Tensor
    bias: Tensor | None
    trained: list[Tensor]
    ones: Tensor


class ProductCall(Call):
    """A call of Linear without a graph: it keeps the input, and then the output's gradient."""

    def __init__(self, leaf: Leaf, product: Product, taken: Tensor) -> None:
        """Keeps what I and W need.

        Args:
            leaf: The layer.
            product: What its calls need.
            taken: What it is called with, [.., inputs].
        """
        super().__init__(leaf, product.trained, ())
        self._product = product
        # A forward may give the parameter other memory before I.
        self._then: Tensor = product.weight.detach()
        self._taken: Tensor | None = taken
        #: The input may have its own switched off once it was used.
        self._input_needs_grad = not taken.stop_gradient
        self._versions = taken.inplace_version, self._then.inplace_version
        self.storages[taken.data_ptr()] = tensor_bytes(taken)

    def leave(self) -> tuple[Tensor, ...]:
        """Computes the output."""
        return (linear(self._taken, self._product.weight, self._product.bias),)

    def input_grads(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Returns the gradient of the input, if it needs one, and keeps that of the output.

        Args:
            grads: The gradient of the output; None if nobody used it.
        """
        taken = self._unchanged()
        self.arrived, (grad,) = grads, grads
        if grad is not None:
            self.storages[grad.data_ptr()] = tensor_bytes(grad)
        if not self._input_needs_grad:
            return []
        return [paddle.zeros_like(taken) if grad is None else _back(grad, self._then)]

    def weight_grads(self) -> list[tuple[Tensor, Tensor]]:
        """Returns the parameters that have a gradient, with it."""
        taken, self._taken = self._unchanged(), None
        (grad,), self.arrived = self.arrived, ()
        if grad is None:
            return []
        weight, bias, trained, ones = self._product
        left, right = _matrix(taken), _matrix(grad)
        of_weight = weight, _product(left, right)
        return [of_weight] if len(trained) == 1 else [(bias, product(ones, right)), of_weight]

    def _unchanged(self) -> Tensor:
        """Returns the input, which is what it was in the forward."""
        taken = self._taken
        if taken is None:
            raise RuntimeError("backward ran twice through a call of a leaf layer")
        if (taken.inplace_version, self._then.inplace_version) != self._versions:
            raise RuntimeError("the input or the weight of a Linear was changed in place before W")
        return taken


def product_of(leaf: Leaf, forward: Callable[..., Nest], taken: Sequence[Tensor]) -> Product | None:
    """Returns what a :class:`ProductCall` needs if a call of ``leaf`` can be one, else None.

    Args:
        leaf: The layer.
        forward: Its forward.
        taken: The tensors that the call takes.
    """
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
    dtype = _DTYPES.get(x.dtype)
    if dtype is None or x.dtype != weight.dtype or casts_automatically():
        return None
    # What does not fit fails in the layer's own forward.
    if x.shape[-1:] != weight.shape[:-1] or not math.prod(x.shape) * weight.shape[-1]:
        return None
    ones = _ones(tuple(x.shape), weight.shape[-1], bias is not None, dtype)
    return None if ones is None else Product(weight, bias, trained, ones)


def _ones(shape: tuple[int, ...], outputs: int, has_bias: bool, dtype: Any) -> Tensor | None:
    """Returns ones for the rows of a call, from the one time that it is tried; None for no way."""
    tried = _tried.setdefault((shape[-1], outputs, has_bias, dtype), {})
    if shape not in tried:
        if len(tried) >= _MOST_SHAPES:
            return None
        draws = range(1 + _ENOUGH // (shape[-1] * outputs))
        same = all(_try(shape, outputs, has_bias, dtype, seed) for seed in draws)
        tried[shape] = paddle.ones([math.prod(shape[:-1])], dtype) if same else None
    return tried[shape]


def _try(shape: tuple[int, ...], outputs: int, has_bias: bool, dtype: Any, seed: int = 0) -> bool:
    """Tries out whether the products have autograd's bits, on random numbers.

    Args:
        shape: Of the input, [.., inputs].
        outputs: Numbers of a row of the output.
        has_bias: Whether one is added.
        dtype: Of all of them.
        seed: Of the random numbers.
    """
    generator = np.random.default_rng(seed)
    sizes = shape, (*shape[:-1], outputs), (shape[-1], outputs)
    x, grad, weight = (paddle.to_tensor(generator.standard_normal(size, dtype)) for size in sizes)
    parameters = [weight, *[paddle.zeros_like(weight[0])] * has_bias]
    for tensor in (x, *parameters):
        tensor.stop_gradient = False
    with paddle.amp.auto_cast(enable=False):
        with paddle.enable_grad():
            plain: Callable[..., Tensor] = paddle.nn.functional.linear
            output = plain(x, *parameters)
            of_input, wanted, *of_bias = paddle.grad(output, [x, *parameters], grad)
        with paddle.no_grad():
            left, right = _matrix(x), _matrix(grad)
            ones = paddle.ones_like(left[:, 0])
            same = bool((_back(grad, parameters[0]) == of_input).all())
            same &= bool((_product(left, right) == wanted).all())
            same &= all(bool((product(ones, right) == expected).all()) for expected in of_bias)
            return same


def _product(left: Tensor, right: Tensor) -> Tensor:
    return product(left, right, left_transposed=True)


def _back(grad: Tensor, weight: Tensor) -> Tensor:
    return product(grad, weight, right_transposed=True)


def _matrix(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim == 2 else reshaped(tensor, [-1, tensor.shape[-1]])
