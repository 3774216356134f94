"""What is refused: numbers, sizes and names that cannot be, and calls too early or too late."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from paddle import nn

from fleetpipe.dygraph.observe.hooks import Timer
from fleetpipe.errors import ConfigError, StateError, is_file_name, is_shape, reason, require_whole
from fleetpipe.fleet.meta_parallel import TensorParallel
from fleetpipe.paddle_api.device import device_kind


@pytest.mark.parametrize("value", [1, 4, np.int64(4)])
def test_whole_numbers_pass_as_such(value: Any) -> None:
    assert type(require_whole("size", value)) is int


@pytest.mark.parametrize("value", [True, False, 1.0, "1", None, -1, np.float32(1), np.bool_(True)])
def test_others_are_refused_with_what_they_are(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        require_whole("size", value, 0, where="here")
    summary, where, got, _ = str(caught.value).splitlines()
    assert summary == "size must be a whole number of at least 0"
    assert (where, got) == ("  where: here", f"  got: size={value!r}")


@pytest.mark.parametrize(
    ("sizes", "possible"),
    [
        ((), True),
        ([1] * 32, True),
        ((0, 4), True),
        ((1 << 57, 1), True),
        ([1] * 33, False),
        ([10**4000], False),
        ((0, 1 << 40, 1 << 40), False),
        ((-1,), False),
        ((True,), False),
        ("ab", False),
    ],
)
def test_sizes_that_no_tensor_has_are_not_multiplied(sizes: Any, possible: bool) -> None:
    assert is_shape(sizes) is possible


@pytest.mark.parametrize("name", ["", ".", "..", ".a", "a/b", "a\0b", "\ud800", "a" * 256])
def test_what_is_no_name_of_a_file(name: str) -> None:
    assert not is_file_name(name)
    assert is_file_name("model-00001.safetensors")


def test_the_reason_of_a_missing_kernel_is_not_the_condition_that_does_not_hold() -> None:
    kernel = "(NotFound) The kernel with key (CPU, NCHW, float16) of `conv2d` is not registered."
    rest = "  [Hint: Expected one != two.] (at a.cc:1)\n  [operator < conv2d > error]"
    assert reason(RuntimeError(f"{kernel}\n{rest}")) == f"RuntimeError: {kernel}"


def test_what_needs_a_job_comes_after_fleet_init() -> None:
    if device_kind() == "cpu":
        with pytest.raises(StateError, match=r"fleet\.init"):
            TensorParallel(nn.Linear(2, 2))


def test_a_timer_starts_and_stops_by_turns() -> None:
    timer = Timer("forward")
    with pytest.raises(StateError, match="start it first"):
        timer.stop()
    timer.start()
    with pytest.raises(StateError, match="stop it first"):
        timer.start()
