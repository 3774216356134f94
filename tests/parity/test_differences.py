"""How far tensors are apart, by another order of sums, or on a device that does not repeat."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleetpipe import fleet, numerics, parity
from fleetpipe.compare.differences import (
    compare,
    compare_numbers,
    compare_values,
    largest_gap,
    same_bits,
)
from fleetpipe.dygraph.backward.added_gradients import Crossing, Meeting, reordered
from fleetpipe.fleet.meta_parallel import LayerDesc
from fleetpipe.parity import parity_report
from fleetpipe.transport.wire import bridge
from tests.fixtures import Patch
from tests.pipelines import batch, job, mlp_layers, pipeline, sgd


def test_equal_bits_are_no_difference() -> None:
    tensor = paddle.randn([3, 4])
    assert compare("loss", "", 0, tensor, tensor.clone()) is None
    assert compare("gradient", "0.weight", 0, None, None) is None


TINY = float(np.nextafter(np.float32(0), np.float32(1)))
UNDER_TWO = float(np.nextafter(np.float32(2), np.float32(0)))


@pytest.mark.parametrize(
    ("dtype", "one", "other", "absolute", "relative", "ulps"),
    [
        ("float32", [1.0, -UNDER_TWO, 3.0], [1.0, -2.0, 3.0], 2.0**-23, 2.0**-23 / 3, 1),
        ("float16", [1 + 3 * 2.0**-10], [1.0], 3 * 2.0**-10, 3 * 2.0**-10, 3),
        ("float64", [1 + 3 * 2.0**-52], [1.0], 3 * 2.0**-52, 3 * 2.0**-52, 3),
        ("bfloat16", [1 + 3 * 2.0**-7], [1.0], 3 * 2.0**-7, 3 * 2.0**-7, 3),
        # A step over zero counts both sides.
        ("float32", [TINY], [-TINY], 2 * TINY, 2.0, 2),
        # The largest finite number is the scale.
        ("float32", [math.inf, 3.0, math.nan], [math.inf, 2.0, math.nan], 1.0, 0.5, 2**22),
        ("complex64", [complex(1, 2)], [complex(1, 2.5)], 0.5, 0.5 / abs(complex(1, 2.5)), 2**21),
        ("int64", [5], [3], 2.0, 2 / 3, 2),
    ],
)
def test_how_far_two_tensors_are_apart(
    dtype: str, one: list[Any], other: list[Any], absolute: float, relative: float, ulps: int
) -> None:
    wide = {"int64": "int64", "complex64": "complex64"}.get(dtype, "float64")
    tensors = [paddle.to_tensor(np.array(values, wide)).astype(dtype) for values in (one, other)]
    found = compare("parameter", "3.weight", 7, *tensors)
    assert found is not None
    assert (found.absolute, found.ulps) == (absolute, ulps)
    assert found.relative == pytest.approx(relative)
    assert str(found).startswith(f"step 7: parameter of 3.weight differs by {absolute:.3g} absol")


def test_a_missing_or_misshapen_tensor_is_a_difference_without_a_size() -> None:
    # NumPy has no bfloat16, and shows it as float32.
    others = paddle.ones([3]), paddle.ones([2], "float64"), paddle.ones([2], "bfloat16")
    for other in (None, *others):
        assert other is None or not same_bits(other, paddle.ones([2]))
        found = compare("gradient", "1.bias", 0, other, paddle.ones([2]))
        assert found is not None
        assert (math.isinf(found.absolute), found.ulps) == (True, None)
        assert "shape or dtype differ" in str(found)


def test_nan_on_one_side_is_infinitely_far_and_on_both_no_gap() -> None:
    nan, two = paddle.to_tensor([math.nan, 1.0]), paddle.to_tensor([2.0, 1.0])
    assert largest_gap(nan, two) == math.inf
    assert largest_gap(nan, paddle.to_tensor([math.nan, 1.5])) == 0.5
    assert largest_gap(None, None) == largest_gap(two, two) == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_any_nan_is_any_other_and_zeros_have_a_sign(dtype: str) -> None:
    nan, other, zeros, minus = (
        paddle.to_tensor(np.array([number, 1.0])).astype(dtype)
        for number in (math.nan, -math.nan, 0.0, -0.0)
    )
    assert dtype == "bfloat16" or not bridge.same_bits(nan, other)
    assert same_bits(nan, other)
    assert compare("output", "", 0, nan, other) is None
    assert not same_bits(zeros, minus)
    found = compare("output", "", 0, minus, zeros)
    assert found is not None
    assert found.absolute == 0


def test_the_parts_of_a_complex_number_are_nan_each_for_itself() -> None:
    one, other = (
        paddle.to_tensor(np.array([complex(math.nan, part), 4], "complex64")) for part in (1, 2)
    )
    assert same_bits(one, one)
    assert not same_bits(one, other)
    found = compare("output", "", 0, one, other)
    assert found is not None
    assert (found.absolute, found.relative) == (1, 0.25)


def test_numbers_are_counted_as_tensors_are() -> None:
    assert compare_numbers("learning rate", "", 0, 0.1, 0.1) == []
    assert compare_numbers("learning rate", "", 0, math.nan, math.nan) == []
    (rate,) = compare_numbers("learning rate", "", 0, math.nextafter(0.1, 1), 0.1)
    (from_nothing,) = compare_numbers("learning rate", "", 0, 0.1, 0.0)
    (epoch,) = compare_numbers("last_epoch", "StepDecay", 0, 2, 1)
    assert (rate.ulps, epoch.ulps, epoch.relative) == (1, 1, 1.0)
    assert (from_nothing.absolute, from_nothing.relative) == (0.1, math.inf)
    assert "shape" not in str(from_nothing)


def test_values_are_compared_by_their_place() -> None:
    ones = paddle.ones([2])
    value = (ones, {"mask": None, "more": [ones, 3]})
    assert compare_values("output", "x", 0, value, value) == []
    for other, place in (
        ((ones, {"mask": ones, "more": [ones, 3]}), "x[1]['mask']"),
        ((ones, {"mask": None, "more": [ones, 4]}), "x[1]['more'][1]"),
        ((ones, {"mask": None, "more": [ones * 2, 3]}), "x[1]['more'][0]"),
        ((ones, {"mask": None, "more": [ones]}), "x[1]['more'][1]"),
        ((ones, {"mask": None, "more": (ones, 3)}), "x[1]['more']"),
    ):
        assert [found.name for found in compare_values("output", "x", 0, other, value)] == [place]


class Fork(nn.Layer):
    """Hands on a tensor, and what else it made of it."""

    def __init__(self, extra: int = 1) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)
        self.extra = extra

    def forward(self, x: Any) -> Any:
        h = self.up(x)
        return (h, *(paddle.tanh(h * (k + 1)) for k in range(self.extra)))


class Once(nn.Layer):
    """Uses each tensor once."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, value: Any) -> Any:
        h, *others = value
        return self.down(paddle.tanh(self.up(h)) + sum(others))


class Twice(Once):
    """Uses the first tensor twice, before and after the others' gradients come back."""

    def forward(self, value: Any) -> Any:
        h, *others = value
        deep = self.down(paddle.tanh(self.up(h)))
        return deep + sum(map(self.down, others)) + self.down(paddle.exp(h * 0.1))


class Passes(nn.Layer):
    """Hands everything on, changed or not."""

    def forward(self, value: Any) -> Any:
        h, *others = value
        return (h, *(paddle.sin(other) for other in others))


class Gated(nn.Layer):
    """A cell that uses its state several times, as others do."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(6, 6)

    def forward(self, x: Any) -> Any:
        return self.cell(x, x)[0] + x


def report(
    layers: list[Any],
    schedule: str = "1F1B",
    scale: float = 1.0,
    frozen_until: int = 0,
    **options: Any,
) -> parity.Report:
    with job(len(options.get("seg_method", [0, 1])), schedule=schedule):
        model = pipeline(layers, **{"seg_method": [0, 1], **options})
        session = parity.begin(model, sgd(model))
        model.layers.state_dict()["0.up.weight"].register_hook(lambda grad: grad * scale)
        for step in range(3):
            for name, parameter in model.layers.named_parameters():
                parameter.stop_gradient = name.startswith("0.") and step < frozen_until
            session.step(batch(seed=step))
    return session.report


ANOTHER: dict[str, list[Any]] = {
    "twice after the border": [LayerDesc(Fork), LayerDesc(Twice)],
    "twice before the border": [LayerDesc(Fork, 2), LayerDesc(Once)],
    "two borders on": [LayerDesc(Fork), LayerDesc(Passes), LayerDesc(Twice)],
}


@pytest.mark.parametrize("kind", ANOTHER)
def test_what_meets_in_another_order_is_held_to_rounding_and_told(kind: str) -> None:
    layers = ANOTHER[kind]
    found = report(layers, seg_method=list(range(len(layers))))
    assert found.passed, found.verdict()
    assert found.tolerance == 1e-5
    assert "stage 0 hands on several tensors" in found.orders[0]
    if found.differences:
        assert "sums have another order: stage 0" in found.verdict()


def test_adam_makes_no_more_of_a_last_bit_than_it_is() -> None:
    """Of a gradient below its epsilon Adam makes a step in which the last bits are large."""
    with job(2):
        model = pipeline(ANOTHER["twice before the border"], seg_method=[0, 1])
        optimizer = paddle.optimizer.AdamW(10.0, epsilon=1e-12, parameters=model.parameters())
        session = parity.begin(model, fleet.distributed_optimizer(optimizer))
        for step in range(4):
            session.step(batch(seed=step))
    report = session.report
    quantities = {found.quantity for found in report.differences}
    assert report.passed, report.verdict()
    assert "gradient" in quantities
    assert "parameter" not in quantities
    assert not report.bit_exact


def test_what_meets_only_once_a_layer_is_unfrozen_is_told_then() -> None:
    found = report(ANOTHER["twice after the border"], frozen_until=2)
    assert found.passed, found.verdict()
    assert "stage 0 hands on several tensors" in found.orders[0]


def test_what_goes_to_other_stages_than_the_next_may_be_a_sum() -> None:
    hands_on_two = Crossing((), (Meeting(3, (), (0, 1)),))
    takes_one = Crossing((Meeting(1, (), (0,)),), ())
    assert reordered({0: hands_on_two, 1: takes_one, 2: takes_one}) == [0]


def test_a_wrong_gradient_is_found_there_too() -> None:
    found = report(ANOTHER["twice after the border"], scale=1.001)
    assert not found.passed
    assert found.failures[0].name == "0.up.weight"


@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
def test_two_gradients_have_no_order(schedule: str) -> None:
    found = report([LayerDesc(Fork), LayerDesc(Once)], schedule)
    assert (found.orders, found.tolerance, found.differences) == ([], 0.0, [])


def test_a_split_layer_that_uses_an_input_several_times_is_told() -> None:
    layers = [LayerDesc(Fork, 0), lambda value: value[0], LayerDesc(Gated)]
    layers.append(LayerDesc(nn.Linear, 6, 4))
    assert report(layers, "1F1B", seg_method=[0, 2]).differences == []
    found = report(layers, "ZBH1", seg_method=[0, 2])
    assert found.passed, found.verdict()
    assert found.orders == ["the backward of layer 2.cell is split"]


NOISE = np.random.default_rng(3)


class Noisy(nn.Linear):  # type: ignore[misc]
    """Adds up in another order each time, as a kernel with atomic additions does."""

    size = 1e-6

    def forward(self, input: Any) -> Any:
        noise = paddle.to_tensor(NOISE.standard_normal(input.shape).astype("float32"))
        return super().forward(input * (1 + self.size * noise))


def compared(patch: Patch, device: str = "gpu", size: float = 1e-6, wrong: float = 1) -> Any:
    """Trains three steps, the gradient of one layer of the pipeline ``wrong`` times what it is."""
    patch.setattr(parity_report, "device_kind", lambda: device)
    patch.setattr(Noisy, "size", size)
    first, *rest = mlp_layers()
    with job(2):
        model = pipeline([first, LayerDesc(Noisy, 8, 8), *rest])
        session = parity.begin(model, sgd(model))
        weight = dict(model.layers.named_parameters())["1.weight"]
        weight.register_hook(lambda gradient: gradient * wrong)
        for step in range(3):
            session.step(batch(seed=step))
        session.eval_batch(batch(), compute_loss=True)
    return session.report


def test_what_does_not_repeat_passes_within_what_it_repeats(monkeypatch: Patch) -> None:
    report = compared(monkeypatch)
    _, repeats, verdict = report.verdict().splitlines()
    assert repeats.startswith("parity: this device does not repeat its bits: two runs on it alone")
    assert verdict.startswith("parity: equal within what this device repeats")
    assert (report.passed, report.bit_exact) == (True, False)
    assert 1e-8 < report.largest_spread[0] < 1e-4


@pytest.mark.parametrize("wrong", [1.01, 1.001])
def test_what_is_wrong_beside_it_is_named(wrong: float, monkeypatch: Patch) -> None:
    report = compared(monkeypatch, wrong=wrong)
    assert "does not repeat its bits" in report.verdict()
    assert (report.first_of_a_layer.quantity, report.first_of_a_layer.name) == (
        ("gradient", "1.weight")
    )


def test_what_is_drawn_anew_in_each_run_does_not_pass(monkeypatch: Patch) -> None:
    assert not compared(monkeypatch, size=1.0).passed


def test_on_a_cpu_the_reference_runs_once_and_nothing_passes(monkeypatch: Patch) -> None:
    report = compared(monkeypatch, device="cpu")
    assert not report.passed
    assert "repeat" not in report.verdict()


def test_a_gpu_repeats_its_bits_as_far_as_its_flags_can(monkeypatch: Patch) -> None:
    flags: dict[str, Any] = {}
    monkeypatch.setattr(paddle.device, "get_device", lambda: "gpu:0")
    monkeypatch.setattr(paddle, "set_flags", flags.update)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    numerics.repeat_bits()
    assert flags["FLAGS_embedding_deterministic"] == flags["FLAGS_cudnn_deterministic"] == 1
    assert numerics.settings()["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
