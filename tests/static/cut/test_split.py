"""What a program must look like to be cut, and what the errors say."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import paddle
import pytest
from paddle import nn
from paddle.static import device_guard

from fleetpipe.errors import BoundaryError, ConfigError, PartitionError
from fleetpipe.schedules import Edge
from fleetpipe.static import stage_guard
from fleetpipe.static.cut.split import ranks_for, split
from fleetpipe.static.ir.readers import read
from tests.static.networks import FEATURES, mlp, static_mode


def data() -> Any:
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


def test_a_program_without_a_guard() -> None:
    def build() -> None:
        paddle.exp(data())

    message = refused(PartitionError, build)
    assert "no operation of the program has a stage" in message
    assert 'device_guard("gpu:0")' in message
    assert line(message) == "paddle.exp(data())"


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
            first = nn.functional.relu(data())
        with device_guard(stages[1]):
            paddle.exp(first)

    message = refused(PartitionError, build)
    assert [word for word in words if word not in message] == []
    assert line(message) == "paddle.exp(first)"


@pytest.mark.parametrize("other", [0, 2])
def test_control_flow_over_two_stages(other: int) -> None:
    def build() -> None:
        with device_guard("gpu:0"):
            first = nn.functional.relu(data())

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
            value = build(data())
        with device_guard("gpu:0"):
            nn.functional.relu(value)

    message = refused(PartitionError, everywhere)
    assert words in message
    assert named in line(message)


def test_a_guard_without_a_number_is_named_as_the_cause() -> None:
    def build() -> None:
        with device_guard("gpu"):
            paddle.exp(data())

    assert "one without a number ('gpu', 'cpu')" in refused(PartitionError, build)


def test_edges_are_those_of_the_values() -> None:
    def build() -> None:
        with stage_guard(0):
            first = nn.functional.relu(data())
        unguarded = paddle.exp(first)
        with stage_guard(1):
            second = unguarded * first
        with stage_guard(2):
            second + first

    found = cut(build)
    assert found.stages == 3
    assert found.edges == (Edge(0, 1), Edge(0, 2), Edge(1, 2))
    assert [len(found.crossing[edge]) for edge in found.edges] == [2, 1, 1]


def test_fed_data_is_fed_where_it_is_used() -> None:
    found = cut(mlp(3))
    assert found.edges == (Edge(0, 1), Edge(1, 2))
    assert all(len(values) == 1 for values in found.crossing.values())


def chain(stages: int) -> Any:
    """As many stages of one operation each."""

    def build() -> None:
        value = data()
        for stage in range(stages):
            with stage_guard(stage):
                value = paddle.exp(value)

    return build


@pytest.mark.parametrize("device", ["gpu:x", "gpu:-1"])
def test_a_guard_that_names_no_stage(device: str) -> None:
    if not hasattr(paddle, "pir") or not hasattr(paddle.pir, "set_chunk_id"):
        pytest.skip("the older Program reads the guards when it is cut")
    with static_mode(), pytest.raises(ConfigError, match="names no stage"), device_guard(device):
        pass


@pytest.mark.parametrize("stage", [-1, True, 1.0])
def test_a_stage_guard_takes_a_number(stage: Any) -> None:
    with pytest.raises(ConfigError, match="whole number"):
        stage_guard(stage)


@pytest.mark.parametrize(
    ("stages", "given", "world", "interleaved", "expected"),
    [
        (4, None, 1, 1, (4, 1)),
        (4, None, 4, 1, (4, 1)),
        (2, None, 4, 1, (2, 1)),
        (4, None, 1, 2, (2, 2)),
        (8, None, 2, 2, (2, 4)),
        (6, 2, 2, 1, (2, 3)),
    ],
)
def test_stages_are_placed_on_ranks(
    stages: int, given: int | None, world: int, interleaved: int, expected: tuple[int, int]
) -> None:
    assert ranks_for(cut(chain(stages)), given, world, interleaved) == expected


@pytest.mark.parametrize(
    ("stages", "given", "world", "words"),
    [(4, None, 2, "Interleaved1F1B"), (3, None, 4, "multiple of 3"), (5, 2, 2, "on 2 ranks alike")],
)
def test_stages_that_do_not_fit_the_ranks(
    stages: int, given: int | None, world: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        ranks_for(cut(chain(stages)), given, world, 1)
    assert line(str(caught.value)) == "value = paddle.exp(value)"
