"""Leaf layers that are computed in less time: autograd's bits, and all that autograd does."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleetpipe.contrib import fast_leaves as leaves
from fleetpipe.contrib.fast_leaves import matrices, same_results
from fleetpipe.dygraph.backward.split import SplitBackward
from fleetpipe.fleet.meta_parallel import LayerDesc
from fleetpipe.paddle_api import eager_operations
from fleetpipe.schedules import build
from tests.dygraph.backward.test_split import grads_of, numbers, score
from tests.fixtures import Patch
from tests.pipelines import FEATURES, batch, bits, job, pipeline, sgd

WHOLE = build("1F1B", ranks=1, micro_batches=1)

#: Shapes of inputs, and numbers of a row of the output.
SIZES = [((128, 24), 128), ((2, 64, 16), 256), ((700, 8), 40), ((1, 3), 16384), ((16384, 2), 1)]


THRESHOLDS = leaves._LEAST_SIZE, leaves._LEAST_COLUMNS


@pytest.fixture(autouse=True)
def _small_layers(monkeypatch: Patch) -> None:
    """Layers are taken that are too small to gain time: so tests are short."""
    monkeypatch.setattr(leaves, "_LEAST_SIZE", 2**14)
    monkeypatch.setattr(leaves, "_LEAST_COLUMNS", 1)


@pytest.fixture
def fast(monkeypatch: Patch) -> list[tuple[int, ...]]:
    """The shapes of what the fast way took."""
    shapes: list[tuple[int, ...]] = []
    original = leaves._linear_by_products

    def noted(x: Any, weight: Any, bias: Any) -> Any:
        shapes.append(tuple(x.shape))
        return original(x, weight, bias)

    monkeypatch.setattr(leaves, "_linear_by_products", noted)
    monkeypatch.setattr(leaves, "_results", {})
    leaves._has_same_sums.cache_clear()
    return shapes


@contextmanager
def running(layer: Any, fast_leaves: bool = True) -> Iterator[Any]:
    """Runs a layer as a stage does whose backward is not split."""
    split = SplitBackward(WHOLE, lambda stage: {0: layer}, fast_leaves)
    with split.recording(0, 0):  # type: ignore[arg-type]
        yield layer
    assert "forward" not in vars(layer)


def two(make: Callable[[], Any] = lambda: nn.Linear(24, 128)) -> tuple[Any, Any]:
    """The same layer twice."""
    pair = []
    for _ in range(2):
        paddle.seed(3)
        pair.append(make())
    return pair[0], pair[1]


def taken(shapes: list[tuple[int, ...]], shape: tuple[int, ...] = (128, 24)) -> int:
    """How often the fast way took an input of a shape; what is tried has others too."""
    return shapes.count(shape)


def has_the_same_bits(
    use: Callable[[Any], list[Any]], make: Callable[[], Any] = lambda: nn.Linear(24, 128)
) -> list[bytes | None]:
    """What ``use(layer)`` and a layer's gradients are, as plain and as fast leaf in bits.

    ``use`` runs within the forward of a stage, and then ends with what it yields.
    """
    results = []
    for layer, way in zip(two(make), (False, True)):
        uses = use(layer)
        with running(layer, way):
            next(uses)
        found = [None if tensor is None else tensor.numpy().tobytes() for tensor in next(uses)]
        results.append([*found, *grads_of(layer)])
    assert results[0] == results[1]
    return results[1]


def scored(*shape: int) -> Callable[[Any], Any]:
    """Uses a layer once, on an input of a shape that needs a gradient."""

    def use(layer: Any) -> Any:
        x = numbers(*shape)
        yield (output := layer(input=x))
        score(output).backward()
        yield [x.grad, output]

    return use


@pytest.mark.parametrize(("shape", "outputs"), SIZES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_micro_batch_has_the_bits_of_autograd(
    shape: tuple[int, ...], outputs: int, dtype: str, fast: list[tuple[int, ...]]
) -> None:
    def use(layer: Any) -> Any:
        inputs = [numbers(*shape, seed=k).astype(dtype).detach() for k in range(3)]
        for x in inputs:
            x.stop_gradient = False
        yield (outputs := [layer(input=x) for x in inputs])
        for output in outputs:
            score(output.astype("float32")).backward()
        yield [*(x.grad for x in inputs), *outputs]

    has_the_same_bits(use, lambda: nn.Linear(shape[-1], outputs).to(dtype=dtype))
    # One sum alone is a product of vectors, which adds in another order.
    assert (shape in fast) == (outputs > 1)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_unusual_numbers_are_tried(dtype: str) -> None:
    kinds = list(matrices((64, 8), getattr(paddle, dtype)))
    assert len(kinds) == 20
    assert {tuple(kind.shape) for kind in kinds} == {(64, 8)}
    every = np.concatenate([kind.numpy().reshape(-1) for kind in kinds])
    assert np.isnan(every).any()
    assert np.isinf(every).any()
    assert ((every != 0) & (abs(every) < np.finfo(dtype).tiny)).any()
    assert {str(number) for number in every if number == 0} == {"0.0", "-0.0"}


def test_a_large_weight_is_tried_in_the_memory_of_a_few() -> None:
    tracemalloc.start()
    try:
        leaves._try_sizes(8, 1024, 4096, paddle.float32)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 4 * 1024 * 4096 * 4


def test_a_difference_in_one_bit_is_seen() -> None:
    x, zeros = paddle.ones([2, 2]), paddle.zeros([2, 2])
    minus = paddle.full([2, 2], -1.0)
    assert same_results(paddle.sin, paddle.sin, (x,), x)
    assert not same_results(paddle.sin, lambda x: paddle.sin(x) * (1 + 2**-23), (x,), x)
    assert not same_results(
        lambda x: x * x, lambda x: x * x * minus * minus * minus, (zeros,), zeros
    )


def test_other_bits_are_not_used(monkeypatch: Patch, fast: list[tuple[int, ...]]) -> None:
    monkeypatch.setattr(
        leaves, "_ones", lambda rows, dtype: paddle.full([1, rows], 1 + 2**-23, dtype)
    )
    has_the_same_bits(scored(128, 24))


@pytest.mark.once
def test_operations_are_looked_up_when_they_are_called(monkeypatch: Patch) -> None:
    # A rehearsal replaces them for a time, in which this module may be loaded.
    monkeypatch.setattr(eager_operations, "total", lambda left, right: left)
    one = paddle.ones([1, 1])
    assert leaves._linear_by_products(one, one, one).item() == 1


@pytest.mark.parametrize("frozen", ["weight", "bias", "input"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    def use(layer: Any) -> Any:
        x = numbers(128, 24)
        (x if frozen == "input" else getattr(layer, frozen)).stop_gradient = True
        yield (output := layer(x))
        score(output).backward()
        yield [x.grad]

    assert None in has_the_same_bits(use)


def test_hooks_are_heeded(fast: list[tuple[int, ...]]) -> None:
    def use(layer: Any) -> Any:
        seen: list[Any] = []
        x = numbers(128, 24)
        yield (output := layer(x))
        for tensor in (x, output, *layer.parameters()):
            tensor.register_hook(lambda grad: [seen.append(grad.clone()), grad * 2][1])
        score(output).backward()
        assert len(seen) == 4
        yield [x.grad, *sorted(seen, key=lambda grad: str(grad.shape))]

    has_the_same_bits(use)
    assert taken(fast) > 0


def test_gradients_of_some_tensors_and_of_gradients(fast: list[tuple[int, ...]]) -> None:
    def use(layer: Any) -> Any:
        x = numbers(128, 24)
        output = paddle.tanh(layer(x))
        (slope,) = paddle.grad(score(output), [x], create_graph=True)
        (alone,) = paddle.grad(score(output), [layer.bias], retain_graph=True)
        assert layer.bias.grad is None
        yield
        score(slope).backward()
        yield [slope, alone, x.grad]

    has_the_same_bits(use)
    assert taken(fast) > 0


def test_what_backward_needs_may_not_change() -> None:
    layer = nn.Linear(24, 128)
    x = numbers(128, 24).detach()
    with running(layer):
        output = layer(x)
    x.scale_(2.0)
    with pytest.raises(Exception, match="inplace"):
        score(output).backward()


@pytest.mark.parametrize("why", ["cast", "off", "no gradients", "small", "replaced", "in a class"])
def test_where_layers_stay_as_they_are(
    why: str, fast: list[tuple[int, ...]], monkeypatch: Patch
) -> None:
    layer, x = nn.Linear(24, 128), numbers(16 if why == "small" else 128, 24)
    if why == "in a class":
        original = nn.Linear.forward
        monkeypatch.setattr(nn.Linear, "forward", lambda self, x: original(self, x) + 1)
    if why == "replaced":
        layer.forward = paddle.tanh
    split = SplitBackward(WHOLE, lambda stage: {0: layer}, why != "off")
    if why == "cast":
        # On a CPU auto_cast itself does nothing.
        monkeypatch.setattr(leaves, "casts_automatically", lambda: True)
    expected = layer(x)
    with split.recording(0, 0), paddle.set_grad_enabled(why != "no gradients"):  # type: ignore[arg-type]
        assert layer(x).numpy().tobytes() == expected.numpy().tobytes()
    assert fast == []


@pytest.mark.parametrize(
    ("rows", "outputs", "is_fast"),
    [(128, 256, True), (127, 256, False), (32, 1024, True), (512, 255, False), (300, 300, True)],
)
def test_layers_are_taken_that_gain_time(
    rows: int, outputs: int, is_fast: bool, fast: list[tuple[int, ...]], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(leaves, "_LEAST_SIZE", THRESHOLDS[0])
    monkeypatch.setattr(leaves, "_LEAST_COLUMNS", THRESHOLDS[1])
    with running(nn.Linear(3, outputs)) as layer:
        layer(numbers(rows, 3))
    assert ((rows, 3) in fast) == is_fast


@pytest.mark.parametrize("shape", [[1], [1, 128], [128, 128]])
def test_a_bias_of_another_shape_stays_with_autograd(shape: list[int]) -> None:
    def make() -> Any:
        layer = nn.Linear(24, 128)
        layer.bias = layer.create_parameter(shape, is_bias=True)
        return layer

    has_the_same_bits(scored(128, 24), make)


def test_not_every_number_of_rows_is_tried(fast: list[tuple[int, ...]]) -> None:
    for rows in range(4, 20):
        has_the_same_bits(scored(rows, 2), lambda: nn.Linear(2, 4096))
    (tried,) = leaves._results.values()
    assert set(tried) == set(range(4, 4 + leaves._MOST_ROW_COUNTS))


@pytest.mark.parametrize(("schedule", "chunks"), [("1F1B", 1), ("FThenB", 1), ("1F1B", 2)])
@pytest.mark.parametrize("interval", [0, 1])
def test_pipelines_use_them(
    schedule: str, chunks: int, interval: int, fast: list[tuple[int, ...]]
) -> None:
    def layers() -> list[Any]:
        sizes = [(FEATURES, 8192), (8192, 2), (2, 8192), (8192, 4)]
        return [LayerDesc(nn.Linear, *size) for size in sizes]

    states = []
    for quick in (False, True):
        assert FEATURES not in {shape[-1] for shape in fast}
        paddle.seed(5)
        with job(2, 4, schedule, fast_leaves=quick):
            model = pipeline(
                layers(),
                num_virtual_pipeline_stages=chunks,
                recompute_interval=interval,
                recompute_ctx={"mp_group": None, "offload": False, "partition": False},
            )
            optimizer = sgd(model, 0.01)
            losses = [
                model.train_batch(batch(4, seed), optimizer).numpy().tobytes() for seed in range(2)
            ]
            states.append((losses, bits(model.state_dict())))
    assert states[0] == states[1]
    assert FEATURES in {shape[-1] for shape in fast}
