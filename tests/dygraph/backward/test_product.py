"""W of a Linear as products: autograd's bits in every batch, seen by all that watch gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe.dygraph.backward import linear_and_embedding
from fleetpipe.paddle_api import VERSION
from fleetpipe.paddle_api.rehearsal import end_rehearsal, rehearse
from tests.dygraph.models import Steps, grads_of, numbers, score

MICRO_BATCHES = 3
#: Shapes of inputs, and numbers of a row of the output.
SIZES: list[tuple[tuple[int, ...], int]] = [
    ((1, 1), 1),
    ((8, 16), 16),
    ((2, 3, 5), 7),
    ((128, 64), 64),
    ((128, 256), 256),
    ((4, 32, 96), 200),
    ((700, 24), 40),
    ((1, 1, 5), 4),
    ((1, 64), 64),
]


@pytest.fixture(autouse=True)
def _methods_forgotten() -> Iterator[None]:
    linear_and_embedding._tried.clear()
    yield
    linear_and_embedding._tried.clear()
    end_rehearsal()


def method_of(shape: tuple[int, ...], outputs: int) -> Any:
    """How a Linear of float32 with a bias is made of products."""
    operands = [paddle.zeros(size) for size in (shape, (shape[-1], outputs), (outputs,))]
    return linear_and_embedding._choose_method(operands, paddle.float32, None)


def two(make: Callable[[], Any]) -> tuple[Any, Steps]:
    """The same layer twice: plain, and one whose backward is split."""
    paddle.seed(3)
    plain = make()
    paddle.seed(3)
    return plain, Steps(make())


def batch(plain: Any, steps: Steps, shape: tuple[int, ...], seed: int) -> None:
    """Trains one batch on both sides, all W at its end; the inputs' gradients must agree."""
    inputs = [numbers(*shape, seed=seed + k) for k in range(MICRO_BATCHES)]
    copies = [numbers(*shape, seed=seed + k) for k in range(MICRO_BATCHES)]
    for x in copies:
        score(plain(x)).backward()
    for k, x in enumerate(inputs):
        steps.input_grads(k, score(steps.forward(k, x)))
    for k in range(MICRO_BATCHES):
        steps.weight_grads(k)
    steps.split.end()
    for x, copy in zip(inputs, copies):
        assert x.grad.numpy().tobytes() == copy.grad.numpy().tobytes()


@pytest.mark.parametrize(("shape", "outputs"), SIZES)
@pytest.mark.parametrize("bias", [None, False])
@pytest.mark.parametrize("cleared", ["zeroed", "dropped", "kept"])
def test_every_batch_has_the_bits_of_autograd(
    shape: tuple[int, ...], outputs: int, bias: bool | None, cleared: str
) -> None:
    plain, steps = two(lambda: nn.Linear(shape[-1], outputs, bias_attr=bias))
    for number in range(3):
        batch(plain, steps, shape, 10 * number)
        assert grads_of(steps.layer) == grads_of(plain)
        for parameter in (*plain.parameters(), *steps.layer.parameters()):
            if cleared != "kept":
                parameter.clear_gradient(cleared == "zeroed")


def changed(change: Callable[[Any], object]) -> Callable[[], Any]:
    def make() -> Any:
        layer = nn.Linear(16, 16)
        change(layer)
        return layer

    return make


def with_bias(*shape: int) -> Callable[[], Any]:
    def change(layer: Any) -> None:
        layer.bias = layer.create_parameter(shape, is_bias=True)

    return changed(change)


#: Linears that are no two products, or have other parameters than two that are trained.
OTHERS: dict[str, Callable[[], Any]] = {
    "a bias of one": with_bias(1),
    "a bias of a row": with_bias(1, 16),
    "a frozen weight": changed(lambda layer: setattr(layer.weight, "stop_gradient", True)),
    "a frozen bias": changed(lambda layer: setattr(layer.bias, "stop_gradient", True)),
    "a parameter beside": changed(
        lambda layer: setattr(layer, "more", layer.create_parameter([16]))
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_linears_have_the_bits_of_autograd(kind: str) -> None:
    plain, steps = two(OTHERS[kind])
    for number in range(2):
        batch(plain, steps, (8, 16), 10 * number)
    assert grads_of(steps.layer) == grads_of(plain)


def test_small_weights_are_tried_until_no_chance_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(linear_and_embedding, "_try", lambda *args: seeds.append(args[-1]) is None)
    assert method_of((2, 8), 8) is not None
    assert seeds == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("of_bias", [False, True])
def test_a_product_of_other_bits_is_not_used(
    of_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = linear_and_embedding.product

    def other(left: Any, right: Any, **transposed: bool) -> Any:
        changes = (left.ndim == 1) if of_bias else "left_transposed" in transposed
        return original(left, right, **transposed).scale_(1 + 2**-20 * changes)

    monkeypatch.setattr(linear_and_embedding, "product", other)
    plain, steps = two(lambda: nn.Linear(16, 16))
    for number in range(2):
        batch(plain, steps, (8, 16), 10 * number)
    assert grads_of(steps.layer) == grads_of(plain)
    # The weight's is still a product where the bias's alone cannot be one.
    method = method_of((8, 16), 16)
    assert (method is None) == (not of_bias)
    assert method is None or method.ones is None


@pytest.mark.skipif(VERSION.startswith("2."), reason="2.6.2 cannot rehearse half precision")
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kept", [[], ["fused_gemm_epilogue"]])
def test_half_precision_has_the_bits_of_autograd(level: str, dtype: str, kept: list[str]) -> None:
    def make() -> Any:
        linear = nn.Linear(64, 48)
        return paddle.amp.decorate(linear, level=level, dtype=dtype) if level == "O2" else linear

    rehearse(dtype)
    plain, steps = two(make)
    with paddle.amp.auto_cast(custom_black_list=kept, level=level, dtype=dtype):
        for number in range(2):
            batch(plain, steps, (2, 4, 64), 10 * number)
    assert grads_of(steps.layer) == grads_of(plain)
    (tried,) = linear_and_embedding._tried.values()
    assert [method is None for method in tried.values()] == [bool(kept)]


@pytest.mark.skipif(VERSION.startswith("2."), reason="2.6.2 cannot rehearse half precision")
def test_a_call_without_casts_has_a_backward_without_casts() -> None:
    rehearse("bfloat16")
    plain, steps = two(lambda: nn.Linear(16, 16))
    with paddle.amp.auto_cast(level="O1", dtype="bfloat16"):
        for x in (numbers(8, 16, seed=1), numbers(8, 16, seed=2)):
            with paddle.amp.auto_cast(enable=False):
                outputs = plain(x), steps.forward(0, x)
            score(outputs[0]).backward()
            steps.input_grads(0, score(outputs[1]))
            steps.weight_grads(0)
        steps.split.end()
    assert grads_of(steps.layer) == grads_of(plain)


def test_a_hook_sees_every_gradient_from_when_it_is_there() -> None:
    plain, steps = two(lambda: nn.Linear(16, 16))
    seen: list[list[bytes]] = [[], []]
    batch(plain, steps, (8, 16), 0)
    for layer, notes in zip((plain, steps.layer), seen):
        for parameter in layer.parameters():

            def note(grad: Any, notes: list[bytes] = notes) -> Any:
                notes.append(grad.numpy().tobytes())
                return grad * 2

            parameter.register_hook(note)
    batch(plain, steps, (8, 16), 10)
    assert len(seen[0]) == 2 * MICRO_BATCHES
    assert sorted(seen[0]) == sorted(seen[1])
    assert grads_of(steps.layer) == grads_of(plain)


def test_what_runs_behind_a_gradient_runs_for_each() -> None:
    plain, steps = two(lambda: nn.Linear(16, 16))
    calls: list[int] = []
    for number in range(2):
        if number:
            for parameter in steps.layer.parameters():
                parameter._register_backward_hook(lambda: calls.append(1))
        batch(plain, steps, (8, 16), 10 * number)
    assert len(calls) == 2 * MICRO_BATCHES
    assert grads_of(steps.layer) == grads_of(plain)


def test_an_input_changed_before_w_is_refused() -> None:
    steps = Steps(nn.Linear(4, 4))
    x = numbers(3, 4).detach()
    steps.input_grads(0, score(steps.forward(0, x)))
    x.scale_(2.0)
    with pytest.raises(RuntimeError, match="changed in place before W"):
        steps.weight_grads(0)


def test_not_every_length_of_a_batch_is_tried() -> None:
    plain, steps = two(lambda: nn.Linear(4, 4))
    for rows in range(1, 21):
        batch(plain, steps, (rows, 4), rows)
    assert grads_of(steps.layer) == grads_of(plain)
    (tried,) = linear_and_embedding._tried.values()
    assert set(tried) == {(rows, 4) for rows in range(1, linear_and_embedding._MOST_SHAPES + 1)}


def test_a_gradient_that_is_dropped_within_a_batch_begins_anew() -> None:
    steps = Steps(nn.Linear(8, 8))
    for _ in range(2):
        for k in range(2):
            steps.input_grads(k, score(steps.forward(k, numbers(4, 8, seed=k))))
            steps.weight_grads(k)
            dropped = grads_of(steps.layer)
            for parameter in steps.layer.parameters():
                parameter.clear_gradient(False)
        steps.split.end()
    score(steps.layer(numbers(4, 8, seed=1))).backward()
    assert grads_of(steps.layer) == dropped
