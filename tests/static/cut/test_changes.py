"""What operations change in place: constants, fed data, values of a stage, what lives on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle import nn
from paddle.static import device_guard

from fleetpipe.errors import BoundaryError
from fleetpipe.paddle_api.static import is_pir
from tests.static.networks import (
    CLASSES,
    FEATURES,
    Build,
    assert_same,
    batches,
    data,
    pipelined,
    strategy_of,
    unsplit,
)

#: The older Program refuses to write again what crosses between stages.
PIR = is_pir(paddle.static.Program())
#: Makes of a stage's value, and what is fed, the stage's value.
Part = Callable[[Any, Any], Any]


def with_parts(*parts: Part) -> Build:
    """Two stages, each with a part of its own; the same part in both where there is one."""

    def build() -> list[Any]:
        with device_guard("gpu:0"):
            fed, label = data()
            value = parts[0](nn.functional.tanh(nn.Linear(FEATURES, 8)(fed)), fed)
        with device_guard("gpu:1"):
            value = nn.functional.tanh(nn.Linear(8, 8)(parts[-1](value, fed)))
            return [nn.functional.cross_entropy(nn.Linear(8, CLASSES)(value), label)]

    return build


def lasting(name: str = "lasting") -> Any:
    """A variable that lives from batch to batch and is not trained."""
    attr = paddle.ParamAttr(paddle.utils.unique_name.generate(name), trainable=False)
    ones = nn.initializer.Constant(1.0)
    value = paddle.static.create_parameter([1], "float32", attr=attr, default_initializer=ones)
    value.stop_gradient = True
    return value


def counted_constant(value: Any, fed: Any) -> Any:
    count = paddle.zeros([1])
    paddle.increment(count, 2.0)
    value = value * count
    paddle.assign(paddle.full([1], 3.0), output=count)
    return value + count


def moving(value: Any, fed: Any) -> Any:
    scale = lasting()
    new = 0.5 * scale + 0.5 * paddle.mean(paddle.abs(value)).detach().reshape([1])
    paddle.assign(new, output=scale)
    return value / scale


def counter(value: Any, fed: Any) -> Any:
    return value / paddle.increment(lasting())


def statistics(value: Any, fed: Any) -> Any:
    norm = nn.BatchNorm1D(8)
    return norm(value) / (norm._variance + 1.0)


def changed_along_the_way() -> Build:
    """A constant and fed data that stage 0 changes, stage 1 takes, and changes again."""
    values: list[Any] = []

    def first(value: Any, fed: Any) -> Any:
        values[:] = [paddle.zeros([1])]
        paddle.increment(values[0])
        paddle.assign(fed * 2.0, output=fed)
        return value + values[0]

    def second(value: Any, fed: Any) -> Any:
        value = value + values[0] + fed.mean()
        paddle.increment(values[0])
        return value * values[0]

    return with_parts(first, second)


@pytest.mark.parametrize("schedule", ["1F1B", "F-then-B"])
@pytest.mark.parametrize(
    "build",
    [
        *map(with_parts, [counted_constant, moving, counter, statistics]),
        *([changed_along_the_way()] if PIR else []),
    ],
)
def test_what_is_changed_in_place_is_bit_equal(build: Build, schedule: str) -> None:
    def momentum() -> Any:
        return paddle.optimizer.Momentum(0.1, 0.9)

    losses, state = unsplit(build, momentum, batches(3))
    got, got_state = pipelined(build, momentum, batches(3), strategy_of(schedule))
    assert [loss for (loss,) in got] == losses
    assert_same(got_state, state)


def handed_on(value: Any, fed: Any) -> Any:
    """Changes what an earlier stage made."""
    paddle.assign(value * 2.0, output=value)
    return value


def array(value: Any, fed: Any) -> Any:
    index = paddle.zeros([1], "int64")
    written = paddle.tensor.array_write(value, index, paddle.tensor.create_array("float32"))
    return paddle.tensor.array_read(written, index)


def same(value: Any, fed: Any) -> Any:
    return value


def counter_of_another_stage() -> tuple[Part, Part]:
    counts: list[Any] = []

    def first(value: Any, fed: Any) -> Any:
        counts[:] = [lasting("counter")]
        paddle.increment(counts[0])
        return value

    return first, lambda value, fed: value / counts[0]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (counter_of_another_stage(), "'counter_0' is changed by one stage and used by another"),
        (
            (same, handed_on),
            "is changed by one stage and used by|crosses between stages and is wri",
        ),
        # The older Program's array goes from forward to backward as one variable.
        *([((array,), "list of tensors that is written to")] if PIR else []),
    ],
)
def test_what_is_refused_by_name(parts: tuple[Part, ...], words: str) -> None:
    with pytest.raises(BoundaryError, match=words):
        pipelined(with_parts(*parts), lambda: paddle.optimizer.SGD(0.1), batches(1), strategy_of())
