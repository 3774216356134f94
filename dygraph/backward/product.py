"""A call of Linear, whose W is two products: of its weight's gradient, and of its bias's.

Autograd makes the first in memory of its own and then adds it: two more passes over as many numbers
as the weight has. ``paddle.addmm_`` adds while it multiplies. The second, by ones, takes a tenth of
the time of the sum that Paddle's kernels make. Whether either gives the bits of autograd depends on
the sizes, as products are made in blocks; it is tried out once for each.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, Callable, NamedTuple

import numpy as np

from fleetpipe._paddle import paddle
from fleetpipe.aliases import Nest, Tensor
from fleetpipe.dygraph.backward.adding import Sums
from fleetpipe.dygraph.backward.leaf import Leaf
from fleetpipe.dygraph.backward.leaf_call import Call, bytes_of

#: Bytes to which the memory of tensors is aligned; the product of others may have other bits.
_ALIGNMENT = 64

_DTYPES = {paddle.float32: np.float32, paddle.float64: np.float64}


#: Shapes of the input that are tried for a size of weight. Where each batch has a length of its own,
#: to try them all would take longer than it saves.
_MOST_SHAPES = 8

#: What was tried, by what does not change with the batch, and then by the shape of the input.
_found: dict[Hashable, dict[tuple[int, ...], Ways | None]] = {}


class Ways(NamedTuple):
    """How W of a Linear can have the bits of autograd.

    Attributes:
        ones: [rows, 1]; the factor that makes the bias's gradient a product.
        added: Whether the weight's gradient may be added as it is made.
    """

    ones: Tensor
    added: bool


class Product(NamedTuple):
    """Why a call can be a :class:`ProductCall`: the weight, and how W may be done."""

    weight: Tensor
    ways: Ways


class ProductCall(Call):
    """A call of Linear. I frees its graph: W needs the input and the gradient of the output."""

    def __init__(
        self,
        product: Product,
        taken: Tensor,
        parameters: Sequence[Tensor],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> None:
        """Keeps what W needs.

        Args:
            product: The weight, [inputs, outputs], and how W may be done.
            taken: What the layer was called with, [.., inputs].
            parameters: The layer's trainable parameters, the weight among them.
            inputs: ``taken``, if it needs a gradient.
            outputs: What the layer returned.
        """
        super().__init__(parameters, inputs, outputs)
        self._weight, self._ways = product
        self._taken = taken
        self._version = taken.inplace_version
        self._bias = [p for p in parameters if p is not self._weight]

    def _found_in_i(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        found = self._gradients(inputs, retain_graph=False)
        self._graph = None
        return found

    def _note_kept(self) -> None:
        kept = (self._taken, *self.arrived)
        self.storages = {t.data_ptr(): bytes_of(t) for t in kept if t is not None}
        self.hidden_bytes = 0

    def weight_grads(self) -> list[tuple[Tensor, Tensor]]:
        """Returns the parameters that have a gradient, with it."""
        operands = self._operands()
        if operands is None:
            return []
        return [*self._bias_grads(operands[1]), (self._weight, _product(*operands))]

    def add_weight_grads(self, sums: Sums) -> None:
        """Adds the gradients of the parameters to ``sums``."""
        if not self._ways.added or not sums.is_open(self._weight):
            super().add_weight_grads(sums)
            return
        operands = self._operands()
        if operands is None:
            return
        left, right = operands
        sums.add(self._bias_grads(right))
        if _are_aligned(left, right):
            with paddle.no_grad():
                paddle.addmm_(self._weight.grad, left.t(), right)
            sums.note(self._weight)
        else:
            sums.add([(self._weight, _product(left, right))])

    def _bias_grads(self, right: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [(bias, _product(self._ways.ones, right).reshape([-1])) for bias in self._bias]

    def _operands(self) -> tuple[Tensor, Tensor] | None:
        """Returns the two factors of the weight's gradient as matrices; to be called once."""
        (grad,), self.arrived = self.arrived, ()
        if grad is None:
            return None
        if self._taken.inplace_version != self._version:
            raise RuntimeError("the input of a Linear was changed in place before W")
        return _matrix(self._taken), _matrix(grad)


def product_of(
    leaf: Leaf, forward: Callable[..., Nest], taken: Sequence[Tensor], outputs: Sequence[Tensor]
) -> Product | None:
    """Returns what a :class:`ProductCall` needs if a call of ``leaf`` can be one, else None.

    Args:
        leaf: The layer.
        forward: Its forward.
        taken: The tensors that the call takes.
        outputs: The tensors with a gradient that it returned.
    """
    layer = leaf.layer
    if getattr(forward, "__func__", None) is not paddle.nn.Linear.forward:
        return None
    weight, (x,), (y,) = layer.weight, taken, outputs
    ours = any(parameter is weight for parameter in leaf.parameters) and not weight.stop_gradient
    # Within auto_cast they differ, and there are more operations than one.
    alike = x.dtype == y.dtype == weight.dtype and weight.dtype in _DTYPES
    if not ours or not alike or not math.prod(y.shape) * math.prod(x.shape):
        return None
    ways = _ways(tuple(x.shape), y.shape[-1], layer.bias is not None, _DTYPES[x.dtype])
    return None if ways is None else Product(weight, ways)


def _ways(
    shape: tuple[int, ...], outputs: int, has_bias: bool, dtype: type[np.floating[Any]]
) -> Ways | None:
    """Returns what :func:`_try` finds for a call, from the one time that it is tried."""
    found = _found.setdefault((shape[-1], outputs, has_bias, dtype), {})
    if shape not in found:
        if len(found) >= _MOST_SHAPES:
            return None
        found[shape] = _try(shape, outputs, has_bias, dtype)
    return found[shape]


def _try(
    shape: tuple[int, ...], outputs: int, has_bias: bool, dtype: type[np.floating[Any]]
) -> Ways | None:
    """Tries out which ways have autograd's bits, on random numbers: each of a gradient and a sum.

    Args:
        shape: Of the input, [.., inputs].
        outputs: Numbers of a row of the output.
        has_bias: Whether one is added.
        dtype: Of all of them.
    """
    generator = np.random.default_rng(0)
    sizes = shape, (*shape[:-1], outputs), (shape[-1], outputs)
    x, grad, total = (paddle.to_tensor(generator.standard_normal(size, dtype)) for size in sizes)
    parameters = [paddle.zeros_like(total), *[paddle.zeros_like(total[0])] * has_bias]
    for tensor in (x, *parameters):
        tensor.stop_gradient = False
    with paddle.amp.auto_cast(enable=False):
        with paddle.enable_grad():
            linear: Callable[..., Tensor] = paddle.nn.functional.linear
            output = linear(x, *parameters)
            _, wanted, *of_bias = paddle.grad(output, [x, *parameters], grad)
        with paddle.no_grad():
            left, right = _matrix(x), _matrix(grad)
            ones = paddle.ones_like(left[:, :1])
            same = bool((_product(left, right) == wanted).all())
            same &= all(bool((_product(ones, right)[0] == found).all()) for found in of_bias)
            wanted.add_(total)
            paddle.addmm_(total, left.t(), right)
            return Ways(ones, bool((total == wanted).all())) if same else None


def _product(left: Tensor, right: Tensor) -> Tensor:
    multiply: Callable[..., Tensor] = paddle.matmul
    with paddle.no_grad():
        return multiply(left, right, transpose_x=True)


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape([-1, tensor.shape[-1]])


def _are_aligned(*tensors: Tensor) -> bool:
    return all(tensor.data_ptr() % _ALIGNMENT == 0 for tensor in tensors)
