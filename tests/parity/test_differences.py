"""How far two tensors are apart."""

from __future__ import annotations

import math

import numpy as np
import paddle
import pytest

from fleetpipe.compare.differences import (
    compare,
    compare_numbers,
    compare_values,
    largest_gap,
    same_bits,
)
from fleetpipe.transport.wire import bridge


def test_equal_bits_are_no_difference() -> None:
    tensor = paddle.randn([3, 4])
    assert compare("loss", "", 0, tensor, tensor.clone()) is None
    assert compare("gradient", "0.weight", 0, None, None) is None


def test_one_unit_in_the_last_place_is_found_and_counted() -> None:
    reference = paddle.to_tensor([1.0, -2.0, 3.0])
    array = reference.numpy().copy()
    array[1] = np.nextafter(array[1], np.float32(0))
    found = compare("parameter", "3.weight", 7, paddle.to_tensor(array), reference)
    assert found is not None
    assert (found.ulps, found.absolute) == (1, 2.0**-23)
    assert found.relative == 2.0**-23 / 3
    assert str(found).startswith("step 7: parameter of 3.weight differs by 1.19e-07 absolute")


@pytest.mark.parametrize("dtype", ["float16", "float64", "bfloat16"])
def test_units_are_those_of_the_dtype(dtype: str) -> None:
    digits = {"float16": 10, "float64": 52, "bfloat16": 7}[dtype]
    ones = paddle.ones([2], "float64").astype(dtype)
    more = (paddle.ones([2], "float64") + 3 * 2.0**-digits).astype(dtype)
    found = compare("loss", "", 0, more, ones)
    assert found is not None
    assert found.ulps == 3


def test_the_step_over_zero_counts_both_sides() -> None:
    tiny = np.nextafter(np.float32(0), np.float32(1))
    found = compare("loss", "", 0, paddle.to_tensor([tiny]), paddle.to_tensor([-tiny]))
    assert found is not None
    assert found.ulps == 2


def test_a_missing_or_misshapen_tensor_is_a_difference_without_a_size() -> None:
    for other in (None, paddle.ones([3]), paddle.ones([2], "float64")):
        found = compare("gradient", "1.bias", 0, other, paddle.ones([2]))
        assert found is not None
        assert (math.isinf(found.absolute), found.ulps) == (True, None)
        assert "shape or dtype differ" in str(found)


def test_the_same_numbers_of_another_dtype_are_a_difference() -> None:
    # NumPy has no bfloat16, and shows it as float32.
    stored, wide = paddle.ones([2], "bfloat16"), paddle.ones([2], "float32")
    found = compare("gradient", "w", 0, stored, wide)
    assert found is not None
    assert found.ulps is None
    assert not same_bits(stored, wide)


def test_complex_numbers_are_apart_in_both_parts() -> None:
    one, other = (paddle.to_tensor([complex(1, y)], dtype="complex64") for y in (2, 2.5))
    found = compare("output", "", 0, one, other)
    assert found is not None
    assert found.absolute == 0.5
    assert found.ulps == 2**21


def test_nan_on_one_side_is_infinitely_far_and_on_both_no_gap() -> None:
    nan, two = paddle.to_tensor([math.nan, 1.0]), paddle.to_tensor([2.0, 1.0])
    assert largest_gap(nan, two) == math.inf
    assert largest_gap(nan, paddle.to_tensor([math.nan, 1.5])) == 0.5
    assert largest_gap(None, None) == largest_gap(two, two) == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
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


def test_the_scale_of_a_difference_is_the_largest_finite_number() -> None:
    inf = paddle.to_tensor([math.inf, 2.0, math.nan])
    found = compare("output", "", 0, inf + 1, inf)
    assert found is not None
    assert found.relative == 0.5


def test_integers_are_compared_too() -> None:
    found = compare("parameter", "1.count", 0, paddle.to_tensor([5]), paddle.to_tensor([3]))
    assert found is not None
    assert (found.absolute, found.ulps) == (2.0, 2)


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
