"""What goes from entry to entry of an execution sequence: outputs, tuples, named arguments."""

from __future__ import annotations

from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe.compat.colossalai.pipeline.sequence import OUTPUT, RecordedCall
from fleetpipe.errors import BoundaryError


class Scaled(nn.Layer):
    def forward(self, x: Any, scale: Any = None, bias: Any = None) -> Any:
        return x if scale is None else x * scale + (0 if bias is None else bias)


def call(
    layer: Any, front: Any = (), behind: Any = (), first: bool = False, later: Any = ()
) -> Any:
    made = RecordedCall(layer, front, behind, first, frozenset(later))
    return lambda value: made(layer, value)


def number(value: Any) -> float:
    return float(value)


def of(value: float) -> Any:
    return paddle.to_tensor(value)


def test_functions_on_both_sides_of_a_layer_run() -> None:
    run = call(nn.Identity(), [lambda x: x + 1], [lambda x: x * 10, lambda x: x + 3])
    assert number(run(of(1.0))) == 23


def test_a_tuple_is_taken_apart() -> None:
    assert number(call(Scaled())((of(2.0), of(3.0)))) == 6
    # A layer or a function that takes less is given the first ones.
    assert number(call(nn.Identity())((of(2.0), of(3.0)))) == 2
    assert number(call(nn.Identity(), [lambda x, y: y])((of(2.0), of(3.0), of(4.0)))) == 3


def test_a_dict_gives_arguments_by_name_and_keeps_what_later_ones_ask_for() -> None:
    batch = {"x": of(2.0), "scale": of(3.0), "bias": of(1.0), "other": of(0.0)}
    found = call(Scaled(), first=True, later={"bias"})(batch)
    assert list(found) == [OUTPUT, "bias"]
    assert number(found[OUTPUT]) == 7
    assert list(batch) == ["x", "scale", "bias", "other"]
    # The next one is given the output by position, and the bias because it has an argument for it.
    assert number(call(Scaled())({OUTPUT: (of(2.0), of(5.0)), "bias": of(1.0)})) == 11


def test_a_function_changes_the_arguments_that_it_names() -> None:
    def change(bias: Any, scale: Any) -> Any:
        return bias + 1, scale * 2

    batch = {"scale": of(3.0), "x": of(2.0), "bias": of(1.0)}
    assert number(call(Scaled(), [change], first=True)(batch)) == 2 * 6 + 2


def test_a_dict_between_layers_is_a_value_like_any_other() -> None:
    value = {"x": of(2.0)}
    assert call(nn.Identity())(value) is value


def test_a_function_before_the_first_output_needs_a_name_of_the_batchs() -> None:
    with pytest.raises(BoundaryError, match="before the first output"):
        call(Scaled(), [lambda y: y], first=True)({"x": of(2.0)})
