"""What a program must look like to be cut, and what its operations change in place."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle import nn
from paddle.static import device_guard

from fleetpipe.errors import BoundaryError, ConfigError, PartitionError
from fleetpipe.schedules import Edge
from fleetpipe.static import stage_guard
from fleetpipe.static.cut import ranks_for, split
from fleetpipe.static.ir import read
from tests.static.networks import (
    CLASSES,
    FEATURES,
    Build,
    batches,
    data,
    mlp,
    pipelined,
    static_mode,
    strategy_of,
)
from tests.static.run.test_training import PIR, compare, momentum


def fed() -> Any:
    return paddle.static.data("x", [-1, FEATURES])


def cut(build: Any) -> Any:
    with static_mode():
        build()
        return split(read(paddle.static.default_main_program()).graph)


def refused(error: type[Exception], build: Any) -> str:
    with pytest.raises(error) as caught:
        cut(build)
    return str(caught.value)


def line(message: str) -> str:
    """The line of this very file that a message names first."""
    found = re.search(rf"{re.escape(__file__)}, line (\d+)", message)
    assert found, message
    with open(__file__, encoding="utf-8") as source:
        return source.readlines()[int(found[1]) - 1].strip()


@pytest.mark.parametrize("device", [None, "gpu"])
def test_a_program_without_a_guard(device: str | None) -> None:
    def build() -> None:
        with device_guard(device) if device else contextlib.nullcontext():
            paddle.exp(fed())

    message = refused(PartitionError, build)
    for words in ("no operation of the program", 'device_guard("gpu:0")', "one without a number"):
        assert words in message
    assert line(message) == "paddle.exp(fed())"


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        (("gpu:1", "gpu:0"), ["travel backwards", "exp'", "of stage 1"]),
        (("gpu:0", "gpu:2"), ["stage 1 has no operation"]),
        (("gpu:0", "gpu:all"), ["device_guard('gpu:all')"]),
    ],
)
def test_where_a_later_operation_cannot_be(stages: tuple[str, str], words: list[str]) -> None:
    def build() -> None:
        with device_guard(stages[0]):
            first = nn.functional.relu(fed())
        with device_guard(stages[1]):
            paddle.exp(first)

    message = refused(PartitionError, build)
    assert [word for word in words if word not in message] == []
    assert line(message) == "paddle.exp(first)"


@pytest.mark.parametrize("other", [0, 2])
def test_control_flow_over_two_stages(other: int) -> None:
    def build() -> None:
        with device_guard("gpu:0"):
            first = nn.functional.relu(fed())

        def in_stage_1() -> Any:
            with device_guard("gpu:1"):
                return first * 2.0

        def elsewhere() -> Any:
            with device_guard(f"gpu:{other}"):
                return first * 3.0

        with device_guard("gpu:0") if other == 0 else contextlib.nullcontext():
            paddle.static.nn.cond(paddle.mean(first) > 0.0, in_stage_1, elsewhere)

    message = refused(BoundaryError, build)
    assert "control flow reaches over several stages" in message
    assert line(message)


@pytest.mark.parametrize(
    ("build", "words", "named"),
    [
        (lambda value: paddle.bernoulli(value * 0.5), "random numbers", "paddle.bernoulli"),
        (lambda value: nn.BatchNorm1D(FEATURES)(value * 1.0), "by every stage", "nn.BatchNorm1D"),
    ],
)
def test_everywhere_computes_the_same(build: Any, words: str, named: str) -> None:
    def everywhere() -> None:
        with device_guard("gpu:all"):
            value = build(fed())
        with device_guard("gpu:0"):
            nn.functional.relu(value)

    message = refused(PartitionError, everywhere)
    assert words in message
    assert named in line(message)


def test_edges_are_those_of_the_values() -> None:
    def build() -> None:
        with stage_guard(0):
            first = nn.functional.relu(fed())
        unguarded = paddle.exp(first)
        with stage_guard(1):
            second = unguarded * first
        with stage_guard(2):
            second + first

    found = cut(build)
    assert found.stages == 3
    assert found.edges == (Edge(0, 1), Edge(0, 2), Edge(1, 2))
    assert [len(found.crossing[edge]) for edge in found.edges] == [2, 1, 1]
    found = cut(mlp(3))  # fed data is fed where it is used
    assert {edge: len(values) for edge, values in found.crossing.items()} == {
        Edge(0, 1): 1,
        Edge(1, 2): 1,
    }


def chain(stages: int) -> Any:
    """As many stages of one operation each."""

    def build() -> None:
        value = fed()
        for stage in range(stages):
            with stage_guard(stage):
                value = paddle.exp(value)

    return build


@pytest.mark.skipif(not PIR, reason="the older Program reads the guards when it is cut")
@pytest.mark.parametrize("device", ["gpu:x", "gpu:-1"])
def test_a_guard_that_names_no_stage(device: str) -> None:
    with static_mode(), pytest.raises(ConfigError, match="names no stage"), device_guard(device):
        pass


@pytest.mark.parametrize("stage", [-1, True, 1.0])
def test_a_stage_guard_takes_a_number(stage: Any) -> None:
    with pytest.raises(ConfigError, match="whole number"):
        stage_guard(stage)


@pytest.mark.parametrize(
    ("stages", "pp_degree", "world", "interleaved", "expected"),
    [
        *((4, None, 1, 1, (4, 1)), (4, None, 4, 1, (4, 1)), (2, None, 4, 1, (2, 1))),
        *((4, None, 1, 2, (2, 2)), (8, None, 2, 2, (2, 4)), (6, 2, 2, 1, (2, 3))),
        *((4, None, 2, 1, "Interleaved1F1B"), (3, None, 4, 1, "multiple of 3")),
        (5, 2, 2, 1, "on 2 ranks alike"),
    ],
)
def test_stages_are_placed_on_ranks(
    stages: int, pp_degree: int | None, world: int, interleaved: int, expected: Any
) -> None:
    program = cut(chain(stages))
    if isinstance(expected, tuple):
        assert ranks_for(program, pp_degree, world, interleaved) == expected
        return
    with pytest.raises(ConfigError, match=expected) as caught:
        ranks_for(program, pp_degree, world, interleaved)
    assert line(str(caught.value)) == "value = paddle.exp(value)"


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
        # The older Program refuses to write again what crosses between stages.
        *([changed_along_the_way()] if PIR else []),
    ],
)
def test_what_is_changed_in_place_is_bit_equal(build: Build, schedule: str) -> None:
    compare(build, momentum, strategy_of(schedule))


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
