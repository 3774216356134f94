"""Which gradients are computed apart: what kernels allow, and each use that cannot wait for W."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet.utils import recompute
from paddle.nn import functional

from fleetpipe.dygraph.backward.leaf import DIVISIBLE
from fleetpipe.dygraph.tensor_parallel.operations import sum_blocks
from tests.dygraph.models import (
    Around,
    Leaf,
    Parent,
    Steps,
    fused_and_split,
    grads_of,
    numbers,
    score,
    shaken,
    shifted,
)

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


def compiled() -> Any:
    """A static graph around a leaf layer."""
    inner = paddle.jit.to_static(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    return Around(inner, lambda inner, x: inner(x) * 2)


class Masked(nn.Linear):
    """A Linear by its forward, whose weight is computed."""

    def __init__(self) -> None:
        nn.Layer.__init__(self)
        self.kernel = self.create_parameter([4, 4])
        self.bias, self.name = self.create_parameter([4]), None

    @property
    def weight(self) -> Any:
        return self.kernel * 2


IMMEDIATE: dict[str, tuple[Any, str]] = {
    "in a static graph": (compiled, "0.inner.0.weight"),
    "used around its layer": (
        lambda: Around(nn.Linear(4, 4), lambda inner, x: inner(x) @ inner.weight),
        "0.inner.weight",
    ),
    "beside a sublayer's": (Parent, "0.shift"),
    "a forward of its own": (shifted, "0.shift"),
    "weight_norm": (lambda: nn.utils.weight_norm(nn.Linear(4, 4)), "0.weight_g"),
    "a property for a weight": (Masked, "0.kernel"),
}


@pytest.mark.parametrize("kind", IMMEDIATE)
def test_what_cannot_wait_gets_its_gradient_in_i(kind: str) -> None:
    make, name = IMMEDIATE[kind]
    inputs = [numbers(6, 4, seed=k) for k in range(3)]
    paddle.seed(5)
    plain = shaken(make())
    steps = Steps(make())
    steps.layer.set_state_dict(plain.state_dict())
    for k, x in enumerate(inputs):
        y = x.detach()
        y.stop_gradient = False
        paddle.seed(k)
        score(plain(y)).backward()
        paddle.seed(k)
        steps.input_grads(k, score(steps.forward(k, x)))
        assert x.grad.numpy().tobytes() == y.grad.numpy().tobytes()
        steps.weight_grads(k)
    assert name not in steps.gradients_in_w()
    trained = [p for p in steps.layer.parameters() if not p.stop_gradient]
    for ours, theirs in zip(trained, (p for p in plain.parameters() if not p.stop_gradient)):
        np.testing.assert_allclose(ours.grad.numpy(), theirs.grad.numpy(), rtol=1e-6, atol=1e-6)


class Changing(nn.Layer):
    """Weights that it has itself, and what each call does with them, by its number."""

    def __init__(self, *ways: Any) -> None:
        super().__init__()
        self.before, self.ways, self.calls = nn.Linear(4, 4), ways, -1
        self.inner = Leaf(self.chosen, weight=[4, 4], shift=[4])
        self.kept: Any = None

    def chosen(self, x: Any, *parameters: Any) -> Any:
        self.calls += 1
        return self.ways[min(self.calls, len(self.ways) - 1)](self, x, *parameters)

    def forward(self, x: Any) -> Any:
        y = self.inner(self.before(x))
        return (y["y"] if isinstance(y, dict) else y) + (0 if self.kept is None else self.kept)


def plainly(_: Any, x: Any, weight: Any, shift: Any) -> Any:
    return x @ weight + shift


def beside(owner: Any, x: Any, weight: Any, shift: Any) -> Any:
    owner.kept = (x * x).mean() + (x @ weight).sum()
    return x @ weight + shift


def remembering(owner: Any, x: Any, weight: Any, shift: Any) -> Any:
    y = x @ weight + (shift if owner.calls == 0 else shift * owner.memory)
    owner.memory = y.detach()
    return y


def norm(_: Any, x: Any, weight: Any, shift: Any) -> Any:
    return nn.functional.layer_norm(x, [4], shift, shift) @ weight


#: What the calls of a leaf do, one after another.
WAYS: dict[str, tuple[Any, ...]] = {
    "returns its input at first": (lambda _, x, *__: x, plainly),
    "returns its input later": (plainly, lambda _, x, *__: x),
    "looks at its input later": (lambda _, x, weight, shift: x.detach() @ weight, plainly),
    "looks away later": (plainly, lambda _, x, weight, shift: x.detach() @ weight + shift),
    "without gradients later": (
        plainly,
        lambda _, x, *parts: paddle.no_grad()(plainly)(_, x, *parts) + x,
    ),
    "layer_norm later": (plainly, norm),
    "prelu later": (
        plainly,
        lambda _, x, weight, shift: nn.functional.prelu(x @ weight, shift[:1]),
    ),
    "a dict later": (plainly, lambda *parts: {"y": plainly(*parts)}),
    "one parameter later": (plainly, lambda _, x, weight, shift: x @ weight),
    "keeps something beside": (beside,),
    "keeps something beside later": (plainly, beside),
    "a memory": (remembering,),
}


@pytest.mark.parametrize("kind", WAYS)
def test_a_leaf_that_does_something_else_in_each_call_has_the_bits_of_autograd(kind: str) -> None:
    inputs = [numbers(3, 4, seed=k) for k in range(3)]
    expected, got, steps = fused_and_split(lambda: Changing(*WAYS[kind]), inputs, all_wait=False)
    assert got == expected
    assert steps.layer.calls == len(inputs) - 1


def shadow_weight(layer: Any, _: Any) -> None:
    layer.__dict__["weight"] = layer._parameters["weight"] * layer.bias


def fast_weight(layer: Any, _: Any) -> None:
    layer._parameters["weight"] = paddle.eye(4) * layer.bias


def replace_weight(layer: Any) -> None:
    weight = layer.create_parameter([4, 4])
    weight.set_value(paddle.eye(4))
    layer.weight = weight


#: What happens to a Linear after its first call.
LATER: dict[str, Any] = {
    "weight_norm": nn.utils.weight_norm,
    "a forward of its own": lambda layer: setattr(
        layer, "forward", lambda x: x.detach() @ layer.weight
    ),
    "an attribute for a weight": lambda layer: layer.register_forward_pre_hook(shadow_weight),
    "a result for a parameter": lambda layer: layer.register_forward_pre_hook(fast_weight),
    "another parameter": replace_weight,
    "a frozen bias": lambda layer: setattr(layer.bias, "stop_gradient", True),
}


@pytest.mark.parametrize("kind", LATER)
def test_a_linear_that_is_changed_between_calls_has_the_bits_of_autograd(kind: str) -> None:
    def stack() -> Any:
        return shaken(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)))

    paddle.seed(3)
    plain = stack()
    paddle.seed(3)
    steps = Steps(stack())
    for k in range(3):
        if k == 1:
            LATER[kind](plain[1])
            LATER[kind](steps.layer[1])
        score(plain(numbers(3, 4, seed=k))).backward()
        steps.input_grads(k, score(steps.forward(k, numbers(3, 4, seed=k))))
        steps.weight_grads(k)
        assert grads_of(steps.layer) == grads_of(plain)


@pytest.mark.parametrize("first", [False, True])
def test_layers_within_saved_tensors_hooks_run_as_they_are(first: bool) -> None:
    def some(linear: Any, x: Any) -> Any:
        if first or linear.calls:
            y = recompute(linear, x, use_reentrant=False, preserve_rng_state=False)
        else:
            y = linear(x)
        linear.calls += 1
        return y

    class Counted(Around):
        def __init__(self) -> None:
            super().__init__(nn.Linear(4, 4), some)
            self.inner.calls = 0

    inputs = [numbers(3, 4, seed=k) for k in range(3)]
    expected, got, steps = fused_and_split(Counted, inputs, all_wait=False)
    assert got == expected
    assert "0.inner.weight" not in steps.gradients_in_w()
