"""How far two tensors are apart."""

from __future__ import annotations

import math
from typing import Any

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
