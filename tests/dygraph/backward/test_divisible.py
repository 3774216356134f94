"""Kernels of which some gradients are asked give the bits that all would have.

Shapes have a 1 in each place: there kernels take short cuts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.nn import functional

from fleetpipe.dygraph.backward.leaf import DIVISIBLE
from fleetpipe.dygraph.tensor_parallel.blocks import sum_blocks

Shape = tuple[int, ...]
Operation = Callable[..., Any]

#: An operation and the shapes of its operands.
Case = tuple[Operation, tuple[Shape, ...]]


def with_ones(*sizes: int) -> Iterator[Shape]:
    """The sizes with a 1 in the place of each choice of them."""
    return itertools.product(*((size, 1) for size in sizes))


def elementwise(operation: Operation) -> Iterator[Case]:
    for left, right in itertools.product(with_ones(3, 4, 5), repeat=2):
        for shorter in range(3):
            yield operation, (left, right[shorter:])
            yield operation, (left[shorter:], right)


def products() -> Iterator[Case]:
    for batch, rows, inner, columns in with_ones(3, 4, 5, 6):
        matrix, other = (rows, inner), (inner, columns)
        lefts, rights = ((part, (batch, *part), (1, *part)) for part in (matrix, other))
        for left, right in itertools.product(lefts, rights):
            yield paddle.matmul, (left, right)
        yield paddle.matmul, ((2, batch, *matrix), other)
        yield paddle.matmul, (matrix, (inner,))
        yield paddle.matmul, ((inner,), other)
        yield paddle.matmul, ((inner,), (inner,))
        for left, right in itertools.product((matrix, (batch, *matrix)), (other, (batch, *other))):
            yield transposed, (left, (*right[:-2], columns, inner))


def transposed(left: Any, right: Any) -> Any:
    return paddle.matmul(left, right, transpose_y=True)


def convolved(dimensions: int, operation: Operation, by_channel: bool = False) -> Iterator[Case]:
    for batch, channels, height, width, filters, kernel in with_ones(2, 4, 6, 5, 6, 3):
        image = (batch, channels, height, width, height)[: dimensions + 2]
        window = (kernel,) * dimensions
        weights = (filters, channels, *window)
        if operation is functional.conv2d_transpose:
            weights = (channels, filters, *window)
        if by_channel:
            weights = (channels, 1, *window)
        groups = channels if by_channel else 1

        def call(x: Any, weight: Any, stride: int, groups: int = groups) -> Any:
            padding = int(weight.shape[-1] > 1)
            return operation(x, weight, stride=stride, padding=padding, groups=groups)

        for stride in (1, 2):
            yield lambda x, w, call=call, stride=stride: call(x, w, stride), (image, weights)


def bilinear() -> Iterator[Case]:
    for batch, left, right, out in with_ones(3, 4, 5, 6):
        shapes = (batch, left), (batch, right), (out, left, right), (1, out)
        yield functional.bilinear, shapes


def blocks(operation: Operation) -> Iterator[Case]:
    """Of products of blocks, which all depend on the same operands."""

    def call(x: Any, weight: Any) -> Any:
        pairs = zip(paddle.split(x, 4, axis=1), paddle.split(weight, 4, axis=0))
        return operation([paddle.matmul(*pair) for pair in pairs])

    for rows, columns in with_ones(3, 5):
        yield call, ((rows, 8), (8, columns))


CASES: dict[str, Callable[[], Iterator[Case]]] = {
    "AddGradNode": lambda: elementwise(lambda x, y: x + y),
    "SubtractGradNode": lambda: elementwise(lambda x, y: x - y),
    "MultiplyGradNode": lambda: elementwise(lambda x, y: x * y),
    "MatmulGradNode": products,
    "Conv2dGradNodeFinal": lambda: convolved(2, functional.conv2d),
    "DepthwiseConv2dGradNode": lambda: convolved(2, functional.conv2d, by_channel=True),
    "Conv2dTransposeGradNode": lambda: convolved(2, functional.conv2d_transpose),
    "Conv3dGradNode": lambda: convolved(3, functional.conv3d),
    "BilinearGradNode": bilinear,
    "ConcatGradNode": lambda: blocks(lambda terms: paddle.concat(terms, axis=-1)),
    "GradNodePyLayer__SumOfBlocks": lambda: blocks(sum_blocks),
}


def test_every_kernel_of_the_table_is_tried() -> None:
    assert CASES.keys() == DIVISIBLE


@pytest.mark.parametrize("kernel", CASES)
def test_some_gradients_have_the_bits_of_all(kernel: str) -> None:
    kernels = set()
    for operation, shapes in CASES[kernel]():
        numbers = np.random.default_rng(len(shapes))
        operands = [
            paddle.to_tensor(numbers.standard_normal(shape).astype("float32"), stop_gradient=False)
            for shape in shapes
        ]
        output = operation(*operands)
        kernels.add(output.grad_fn.name().removesuffix("_backward"))
        grad = paddle.cos(paddle.arange(output.size, dtype="float32")).reshape(output.shape)

        def asked(chosen: tuple[int, ...]) -> dict[int, bytes]:
            wanted = [operands[index] for index in chosen]  # noqa: B023 (called within the loop)
            found = paddle.grad([output], wanted, [grad], retain_graph=True)  # noqa: B023
            return {index: one.numpy().tobytes() for index, one in zip(chosen, found)}

        everything = asked(tuple(range(len(operands))))
        for count in range(1, len(operands)):
            for chosen in itertools.combinations(range(len(operands)), count):
                some = asked(chosen)
                assert some == {index: everything[index] for index in chosen}, (shapes, chosen)
    assert kernel in kernels
