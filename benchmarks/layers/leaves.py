"""Leaf layers of Paddle beside other ways to the same numbers: time, and whether bits are the same.

    OMP_NUM_THREADS=1 python benchmarks/layers/leaves.py [--repeats 30]

Forward and backward of one leaf, in turn with another way of Paddle's public API or ``_C_ops``:
least processor time in microseconds, float32. Bits are those of the output and of all gradients,
on twenty inputs: zeros, infinities, NaN, denormal numbers, strided views.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import paddle
from paddle import _C_ops
from paddle.nn import functional

import fleetpipe.fleet  # noqa: F401 (chooses MKL's code as a training does)
from benchmarks.figures import Figure, parser, report
from fleetpipe.contrib.fast_leaves import fast_linear
from fleetpipe.contrib.fast_leaves.fast_linear import matrices, same_results

HIDDEN, ROWS, CLASSES, WORDS = (256, 768), 128, 1000, 2000
#: The way of Paddle's own function.
PLAIN = "Paddle's"

#: ``function(x, *parameters)``.
Way = Callable[..., Any]


class Leaf(NamedTuple):
    """A leaf and other ways to it.

    Attributes:
        name: What it is called.
        shape: Of its input, as a matrix.
        plain: Paddle's way.
        ways: Others, by name.
        parameters: Its parameters.
        view: What makes its input of the matrix.
    """

    name: str
    shape: tuple[int, int]
    plain: Way
    ways: dict[str, Way]
    parameters: Sequence[Any] = ()
    view: Callable[[Any], Any] = lambda matrix: matrix


class _Masked(paddle.autograd.PyLayer):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        y = _C_ops.relu(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (y,) = ctx.saved_tensor()
        return grad * (y > 0).astype(grad.dtype)


class _SoftmaxByProduct(paddle.autograd.PyLayer):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        y = _C_ops.softmax(x, -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (y,) = ctx.saved_tensor()
        return (grad - (grad * y).sum(-1, keepdim=True)) * y


class _Rows(paddle.autograd.PyLayer):  # type: ignore[misc]
    """An embedding whose gradient is a product with a matrix of ones and zeros."""

    @staticmethod
    def forward(ctx: Any, weight: Any, ids: Any) -> Any:
        ctx.save_for_backward(weight, ids)
        return _C_ops.embedding(ids, weight, -1, False)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        weight, ids = ctx.saved_tensor()
        chosen = functional.one_hot(ids.reshape([-1]), weight.shape[0])
        return paddle.matmul(chosen, grad.reshape([-1, grad.shape[-1]]), transpose_x=True)


class _LayerNorm(paddle.autograd.PyLayer):  # type: ignore[misc]
    """Paddle's own steps backward, in whole matrices; sums of rows as products with ones."""

    @staticmethod
    def forward(ctx: Any, x: Any, scale: Any, bias: Any) -> Any:
        attributes = ("epsilon", 1e-5, "begin_norm_axis", 1)
        y, mean, variance = paddle._legacy_C_ops.layer_norm(x, scale, bias, *attributes)
        ctx.save_for_backward(x, scale, mean, variance)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, scale, mean, variance = ctx.saved_tensor()
        rows, size = x.shape
        ones, column = paddle.ones([1, size]), paddle.ones([1, rows])
        deviation = paddle.sqrt((variance + 1e-5).astype("float64")).astype("float32").unsqueeze(1)

        def mean_of_rows(matrix: Any) -> Any:
            total = _C_ops.matmul(ones, matrix, False, True).astype("float64")
            return (total * (1.0 / size)).astype("float32").reshape([-1, 1])

        normal = (x - mean.unsqueeze(1)) / deviation
        of_scale = _C_ops.matmul(column, normal * grad, False, False).reshape([-1])
        of_bias = _C_ops.matmul(column, grad, False, False).reshape([-1])
        scaled = grad * scale
        of_x = scaled - mean_of_rows(scaled)
        of_x = of_x - normal * mean_of_rows(scaled * normal)
        return of_x / deviation, of_scale, of_bias


def _erf(x: Any) -> Any:
    return x * 0.5 * (1.0 + paddle.erf(x * math.sqrt(0.5)))


def _log_softmax(x: Any, label: Any) -> Any:
    return functional.nll_loss(functional.log_softmax(x), label.reshape([-1]))


def _unfolded(x: Any, weight: Any, bias: Any) -> Any:
    columns = functional.unfold(x, 3, paddings=1)
    flat = weight.reshape([weight.shape[0], -1])
    return (paddle.matmul(flat, columns) + bias.unsqueeze(-1)).reshape([1, -1, *x.shape[2:]])


def _added(x: Any, weight: Any, bias: Any) -> Any:
    return functional.conv2d(x, weight, padding=1) + bias.reshape([1, -1, 1, 1])


def leaves(hidden: int) -> list[Leaf]:
    """The leaves of a width."""
    wide = (ROWS, 4 * hidden)
    draw = paddle.randn
    ids, labels = paddle.randint(0, WORDS, [ROWS]), paddle.randint(0, CLASSES, [ROWS, 1])
    channels = hidden // 8
    return [
        Leaf(
            *("GELU", wide, functional.gelu),
            {
                "_C_ops.gelu": lambda x: _C_ops.gelu(x, False),
                "erf and products": _erf,
                "tanh": lambda x: _C_ops.gelu(x, True),
            },
        ),
        Leaf(
            *("ReLU", wide, functional.relu),
            {
                "_C_ops.relu": _C_ops.relu,
                "maximum": lambda x: paddle.maximum(x, paddle.zeros([1])),
                "clip": lambda x: paddle.clip(x, min=0.0),
                "backward by a mask": _Masked.apply,
            },
        ),
        Leaf(
            *("softmax", (8 * ROWS, ROWS), functional.softmax),
            {
                "_C_ops.softmax": lambda x: _C_ops.softmax(x, -1),
                "backward by a sum": _SoftmaxByProduct.apply,
                "exp of log_softmax": lambda x: paddle.exp(functional.log_softmax(x)),
            },
        ),
        Leaf(
            *("cross-entropy", (ROWS, CLASSES)),
            lambda x: functional.cross_entropy(x, labels),
            {
                "_C_ops": lambda x: _C_ops.mean_all(
                    _C_ops.cross_entropy_with_softmax(x, labels, False, True, True, -100, -1)[1]
                ),
                "log_softmax and nll_loss": lambda x: _log_softmax(x, labels),
            },
        ),
        Leaf(
            *("Embedding", (WORDS, hidden)),
            lambda weight: functional.embedding(ids, weight),
            {
                "_C_ops.embedding": lambda weight: _C_ops.embedding(ids, weight, -1, False),
                "gather": lambda weight: paddle.gather(weight, ids),
                "index_select": lambda weight: paddle.index_select(weight, ids),
                "backward by a product": lambda weight: _Rows.apply(weight, ids),
            },
        ),
        Leaf(
            *("Conv2D, 3 x 3", (channels, 16 * 16)),
            lambda x, weight, bias: functional.conv2d(x, weight, bias, padding=1),
            {"unfold and product": _unfolded, "bias apart": _added},
            (draw([channels, channels, 3, 3]), draw([channels])),
            lambda matrix: matrix.reshape([1, channels, 16, 16]),
        ),
        Leaf(
            *("LayerNorm", (ROWS, hidden)),
            lambda x, scale, bias: functional.layer_norm(x, hidden, scale, bias),
            {"products with ones": _LayerNorm.apply},
            (draw([hidden]), draw([hidden])),
        ),
        Leaf(
            *("Linear", (ROWS, hidden), functional.linear),
            {"bias by a product": fast_linear._linear},
            (draw([hidden, 4 * hidden]), draw([4 * hidden])),
        ),
    ]


def is_same(leaf: Leaf, way: Way) -> bool:
    """Whether a way has the bits of Paddle's on twenty inputs."""
    inputs = map(leaf.view, matrices(leaf.shape, paddle.float32))
    operands = [(x, *leaf.parameters) for x in inputs]
    grad = paddle.randn(leaf.plain(*operands[0]).shape)
    return all(same_results(leaf.plain, way, one, grad) for one in operands)


def times(leaf: Leaf, repeats: int) -> dict[str, list[float]]:
    """Returns microseconds of processor time by way, measured in turn."""
    x = leaf.view(paddle.randn(leaf.shape))
    operands = [x, *leaf.parameters]
    grad = paddle.randn(leaf.plain(*operands).shape)
    for operand in operands:
        operand.stop_gradient = False
    ways = {PLAIN: leaf.plain, **leaf.ways}
    measured: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            begin = time.process_time()
            paddle.autograd.backward([way(*operands)], [grad])
            measured[name].append(1e6 * (time.process_time() - begin))
            for operand in operands:
                operand.clear_gradient(set_to_zero=False)
    return measured


def main() -> None:
    options = parser(__doc__ or "", repeats=30).parse_args()
    figures = []
    for hidden in HIDDEN:
        paddle.seed(0)
        for leaf in leaves(hidden):
            measured = times(leaf, options.repeats)
            for name, values in measured.items():
                note = ""
                if name != PLAIN:
                    bits = "the same bits" if is_same(leaf, leaf.ways[name]) else "other bits"
                    note = f", {bits}, {min(values) / min(measured[PLAIN]):.2f} of the time"
                figures.append(Figure(f"{leaf.name} {hidden}: {name}{note}", values, "us"))
    report(figures, options.json)


if __name__ == "__main__":
    main()
