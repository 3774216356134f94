"""W of a Linear as products: autograd's bits in every batch, seen by all that watch gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleetpipe.dygraph.backward import product
from tests.dygraph.backward.leaves import Steps, grads_of, numbers, score

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
def _ways_forgotten() -> Iterator[None]:
    product._tried.clear()
    yield
    product._tried.clear()


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


@pytest.mark.parametrize("shape", [[1], [1, 16]])
def test_a_bias_of_another_shape_is_left_to_autograd(shape: list[int]) -> None:
    def make() -> Any:
        layer = nn.Linear(16, 16)
        layer.bias = layer.create_parameter(shape, is_bias=True)
        return layer

    plain, steps = two(make)
    batch(plain, steps, (8, 16), 0)
    assert steps.layer.bias.grad.shape == shape
    assert grads_of(plain) == grads_of(steps.layer)


def test_small_weights_are_tried_until_no_chance_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(product, "_try", lambda *args: seeds.append(args[-1]) is None)
    assert product._ones((2, 8), 8, True, np.float32) is not None
    assert seeds == [0, 1, 2, 3, 4]


def test_a_product_of_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    original = product._product
    monkeypatch.setattr(product, "_product", lambda *both: original(*both).scale_(1 + 2**-20))
    plain, steps = two(lambda: nn.Linear(16, 16))
    for number in range(2):
        batch(plain, steps, (8, 16), 10 * number)
    assert grads_of(steps.layer) == grads_of(plain)
    assert product._ones((8, 16), 16, True, np.float32) is None


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


def test_a_frozen_part_gets_no_gradient() -> None:
    for frozen in ("weight", "bias"):

        def make(frozen: str = frozen) -> Any:
            layer = nn.Linear(8, 8)
            getattr(layer, frozen).stop_gradient = True
            return layer

        plain, steps = two(make)
        for number in range(2):
            batch(plain, steps, (4, 8), 10 * number)
        assert grads_of(steps.layer) == grads_of(plain)
        assert getattr(steps.layer, frozen).grad is None


class _WithMore(nn.Linear):  # type: ignore[misc]
    """A Linear with a parameter that its forward does not use."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.more = self.create_parameter([16])


def test_a_parameter_beside_weight_and_bias_gets_no_gradient() -> None:
    plain, steps = two(_WithMore)
    for number in range(2):
        batch(plain, steps, (8, 16), 10 * number)
    assert steps.layer.more.grad is None
    assert grads_of(steps.layer) == grads_of(plain)


def test_an_input_that_does_not_fit_fails_as_ever() -> None:
    plain, steps = two(lambda: nn.Linear(16, 16))
    batch(plain, steps, (8, 16), 0)
    for forward in (plain, lambda x: steps.forward(0, x)):
        with pytest.raises(ValueError, match="15"):
            forward(numbers(8, 15, seed=0))
    steps.split.end()
    batch(plain, steps, (8, 16), 10)
    assert grads_of(steps.layer) == grads_of(plain)


def test_an_input_changed_before_w_is_refused() -> None:
    steps = Steps(nn.Linear(4, 4))
    x = numbers(3, 4).detach()
    steps.input_grads(0, score(steps.forward(0, x)))
    x.scale_(2.0)
    with pytest.raises(RuntimeError, match="changed in place before W"):
        steps.weight_grads(0)


def test_a_second_split_of_the_same_layer_adds_as_well() -> None:
    plain, steps = two(lambda: nn.Linear(256, 256))
    batch(plain, steps, (128, 256), 0)
    again = Steps(steps.layer)
    for number in range(1, 3):
        batch(plain, again, (128, 256), 10 * number)
    assert grads_of(steps.layer) == grads_of(plain)


def test_not_every_length_of_a_batch_is_tried() -> None:
    plain, steps = two(lambda: nn.Linear(4, 4))
    for rows in range(1, 21):
        batch(plain, steps, (rows, 4), rows)
    assert grads_of(steps.layer) == grads_of(plain)
    (tried,) = product._tried.values()
    assert set(tried) == {(rows, 4) for rows in range(1, product._MOST_SHAPES + 1)}


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
