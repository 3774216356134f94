"""Tries out whether two ways to compute the same have the same bits, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Callable

import numpy as np

from fleetpipe.aliases import DType, Tensor
from fleetpipe.paddle_api import paddle

#: The dtypes for which there is a way that takes less time.
DTYPES: dict[DType, Any] = {paddle.float32: np.float32, paddle.float64: np.float64}


def matrices(shape: tuple[int, int], dtype: DType) -> Iterator[Tensor]:
    """Yields twenty matrices: of usual numbers, of all unusual kinds, and in views of others.

    Args:
        shape: Rows and columns.
        dtype: One of ``DTYPES``.
    """
    generator, limits = np.random.default_rng(0), np.finfo(DTYPES[dtype])
    rows, columns = shape
    usual = generator.standard_normal(shape).astype(DTYPES[dtype])
    other = usual[::-1, ::-1].copy()
    positive, rare = other > 0, generator.random(shape) < 1 / (4 * rows)
    zeros = np.where(positive, 0.0, -0.0)
    values = [usual, other, usual * usual, usual * other, other**9, usual - usual[0], -usual]
    values += [usual * 1e30, usual * 1e-30, usual * limits.tiny / 4, usual * (limits.max / 8)]
    values += [zeros, np.abs(zeros), -np.abs(zeros), np.where(positive, usual, -0.0)]
    values += [np.where(rare, special, usual) for special in (np.inf, np.nan)]
    for value in values:
        yield paddle.to_tensor(value.astype(DTYPES[dtype]))
    wide = paddle.zeros([rows + 1, columns + 1], dtype)
    wide[1:, 1:] = paddle.to_tensor(usual)
    yield from (paddle.to_tensor(usual.T.copy()).t(), wide[1:, 1:], wide[:-1, :-1])


def same_bits(
    plain: Callable[..., Tensor],
    other: Callable[..., Tensor],
    operands: Sequence[Tensor],
    grad: Tensor,
) -> bool:
    """Returns whether two functions have the same bits: what they return, and all gradients.

    Args:
        plain: The function that autograd differentiates.
        other: Another one.
        operands: What both are called with.
        grad: The gradient of what they return.
    """
    results = []
    for function in (plain, other):
        leaves = [operand.detach() for operand in operands]
        for leaf in leaves:
            leaf.stop_gradient = False
        with paddle.amp.auto_cast(enable=False), paddle.enable_grad():
            output = function(*leaves)
            results.append([output, *paddle.grad(output, leaves, grad)])
    return all(map(_same, *results))


def _same(one: Tensor, other: Tensor) -> bool:
    left, right = (np.ascontiguousarray(tensor.detach().numpy()) for tensor in (one, other))
    whole = left.view(f"u{left.itemsize}") == right.view(f"u{right.itemsize}")
    # What is not a number is so in many ways, and all mean the same.
    return left.shape == right.shape and bool((whole | (np.isnan(left) & np.isnan(right))).all())
