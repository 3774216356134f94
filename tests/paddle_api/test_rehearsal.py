"""What is bfloat16 in a rehearsal, and its bits: against Paddle's lists and a model by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle
import pytest
from paddle import nn
from paddle.amp import amp_lists

from fleetpipe import log
from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api import rehearsal
from fleetpipe.paddle_api.amp import rehearsal_dtype
from fleetpipe.paddle_api.rehearsal import end_rehearsal, rehearse, require_rounding

pytestmark = pytest.mark.once

Array = npt.NDArray[np.float32]
ROWS, INPUTS, HIDDEN, OUTPUTS = 8, 6, 10, 4


@contextmanager
def rehearsing(dtype: str = "bfloat16") -> Iterator[None]:
    rehearse(dtype)
    try:
        yield
    finally:
        end_rehearsal()


def rounded(numbers: Any) -> Array:
    """To the nearest bfloat16, ties to even, as float32."""
    bits = np.asarray(numbers, "float32").view("uint32")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype("uint32").view("float32")


def in_low(level: str, operation: str, *low: bool) -> bool:
    """Whether an operation computes in bfloat16, by Paddle's lists and its operands' dtypes."""
    if operation in amp_lists.white_list()["bfloat16"][level]:
        return True
    return operation not in amp_lists.black_list()["bfloat16"][level] and all(low)


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "matmul_v2": lambda x: paddle.matmul(x, x.t()),
    "conv2d": lambda x: nn.functional.conv2d(x.reshape([1, 1, 4, 4]), x[:1].reshape([1, 1, 2, 2])),
    "elementwise_add": lambda x: x + x,
    "elementwise_mul": lambda x: paddle.multiply(x, x),
    "relu": nn.functional.relu,
    "gelu": nn.functional.gelu,
    "sqrt": paddle.sqrt,
    "scale": lambda x: 3.0 * x,
    "reshape2": lambda x: x.reshape([2, 8]),
    "slice": lambda x: x[:2],
    "concat": lambda x: paddle.concat([x, x]),
    "softmax": nn.functional.softmax,
    "exp": paddle.exp,
    "pow": lambda x: x**2,
    "reduce_sum": lambda x: x.sum(),
    "reduce_mean": lambda x: x.mean(0),
    "layer_norm": lambda x: nn.functional.layer_norm(x, 4),
    "lookup_table_v2": lambda x: nn.functional.embedding(paddle.to_tensor([0, 2]), x),
    "softmax_with_cross_entropy": lambda x: nn.functional.cross_entropy(x, paddle.arange(4)),
}


@pytest.mark.parametrize("level", ["O1", "O2", "OD", "O0"])
def test_results_have_the_dtype_that_paddles_lists_say(level: str) -> None:
    with rehearsing():
        for low in (True, False):
            numbers = paddle.arange(1, 17, dtype="float32").reshape([4, 4])
            inputs = numbers.astype("bfloat16") if low else numbers
            with paddle.amp.auto_cast(level=level, dtype="bfloat16", enable=level != "O0"):
                outputs = {name: run(inputs) for name, run in OPERATIONS.items()}
            for name, output in outputs.items():
                expected = low
                if level != "O0":
                    expected = in_low(level, name, low and level != "OD")
                assert output.dtype == (paddle.bfloat16 if expected else paddle.float32), name


def numbers_of(seed: int) -> dict[str, Array]:
    drawn = np.random.default_rng(seed)
    shapes = {"x": (ROWS, INPUTS), "t": (ROWS, OUTPUTS), "w1": (INPUTS, HIDDEN), "b1": (HIDDEN,)}
    shapes |= {"w2": (HIDDEN, OUTPUTS), "b2": (OUTPUTS,)}
    return {name: drawn.standard_normal(shape).astype("float32") for name, shape in shapes.items()}


def by_hand(level: str, steps: int) -> tuple[list[float], dict[str, Array]]:
    """Losses and float32 weights of Linear, ReLU, Linear and the mean of squares, with SGD."""
    n = numbers_of(0)
    high = level == "O1"
    # decorate rounds the parameters, and master weights begin as copies of these.
    begin: Callable[[Any], Array] = np.float32 if high else rounded
    weights = {name: begin(n[name]) for name in ("w1", "b1", "w2", "b2")}
    of_loss: Callable[[Any], Array] = np.float32 if high else rounded
    x, t = rounded(n["x"]), n["t"] if high else rounded(n["t"])
    losses = []
    for _ in range(steps):
        low = {name: rounded(weight) for name, weight in weights.items()}
        hidden = np.maximum(rounded(x @ low["w1"] + low["b1"]), 0)
        output = rounded(hidden @ low["w2"] + low["b2"])
        off = of_loss(output - t)
        square = of_loss(off * off)
        losses.append(float(of_loss(square.mean(dtype="float32"))))
        d_square = of_loss(np.float32(1 / square.size))
        d_output = rounded(of_loss(2 * off * d_square))
        d_hidden = rounded(d_output @ low["w2"].T) * (hidden > 0)
        grads = {
            "w2": rounded(hidden.T @ d_output),
            "b2": rounded(d_output.sum(0)),
            "w1": rounded(x.T @ d_hidden),
            "b1": rounded(d_hidden.sum(0)),
        }
        for name, grad in grads.items():
            weights[name] = weights[name] - np.float32(0.5) * grad
    return losses, weights


def by_paddle(level: str, steps: int) -> tuple[list[float], dict[str, Array]]:
    n = numbers_of(0)
    model = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUTPUTS))
    for parameter, name in zip(model.parameters(), ("w1", "b1", "w2", "b2")):
        parameter.set_value(n[name])
    optimizer = paddle.optimizer.SGD(0.5, parameters=model.parameters())
    model, optimizer = paddle.amp.decorate(model, optimizer, level=level, dtype="bfloat16")
    x, t = (paddle.to_tensor(n[name]) for name in ("x", "t"))
    if level == "O2":
        t = t.astype("bfloat16")
    losses = []
    for _ in range(steps):
        with paddle.amp.auto_cast(level=level, dtype="bfloat16"):
            loss = paddle.square(model(x) - t).mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    masters = optimizer._master_weights
    weights = {
        name: masters.get(parameter.name, parameter).numpy()
        for parameter, name in zip(model.parameters(), ("w1", "b1", "w2", "b2"))
    }
    for parameter, weight in zip(model.parameters(), weights.values()):
        low = parameter.astype("float32").numpy()
        assert np.array_equal(low, rounded(weight) if level == "O2" else weight)
    return losses, weights


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_model_has_the_numbers_of_one_by_hand(level: str) -> None:
    with rehearsing():
        losses, weights = by_paddle(level, 4)
    expected, by_name = by_hand(level, 4)
    # Sums of float32 may differ in their last place, by their order.
    assert losses == pytest.approx(expected, rel=1e-6)
    for name, weight in weights.items():
        np.testing.assert_allclose(weight, by_name[name], rtol=1e-6, atol=1e-7, err_msg=name)
    plain = [float(np.float32(loss)) for loss in losses]
    assert plain[-1] < 0.7 * plain[0]


def test_another_dtype_than_the_rehearsed_one_is_refused_and_all_is_put_back() -> None:
    before = paddle._C_ops.matmul, paddle.Tensor.__add__
    with rehearsing("float16"):
        assert rehearsal_dtype() == "float16"
        with pytest.raises(ConfigError, match="to bfloat16, and the rehearsal is of float16"):
            paddle.amp.auto_cast(dtype="bfloat16").__enter__()
    assert rehearsal_dtype() is None
    assert (paddle._C_ops.matmul, paddle.Tensor.__add__) == before


def test_casts_that_cut_off_digits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require_rounding("bfloat16")
    monkeypatch.setattr(rehearsal, "cast", lambda tensor, dtype: paddle.ones([]).astype(dtype))
    with pytest.raises(ConfigError, match="cuts off what a GPU rounds"):
        require_rounding("float16")


def test_a_rehearsal_that_rounds_nothing_says_so(caplog: pytest.LogCaptureFixture) -> None:
    log.once.cache_clear()
    with rehearsing():
        paddle.ones([2]) + 1.0
    assert "the rehearsal of bfloat16 had nothing to round" in caplog.text
    caplog.clear()
    log.once.cache_clear()
    with rehearsing(), paddle.amp.auto_cast(dtype="bfloat16"):
        paddle.matmul(paddle.ones([2, 2]), paddle.ones([2, 2]))
    assert caplog.text == ""
