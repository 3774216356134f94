"""Recompute: the same bits as without, from fewer values that are kept between the passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.incubate.optimizer import RecomputeOptimizer
from paddle.static import device_guard

from fleetpipe import fleet
from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api.static import is_pir
from fleetpipe.static import name_of, pipeline_of, state_dict
from tests.fixtures import Call
from tests.static.networks import (
    CLASSES,
    FEATURES,
    MICRO_BATCHES,
    assert_same,
    batches,
    data,
    executor_of,
    static_mode,
    strategy_of,
)

WIDTH, LAYERS = 8, 6
PIR = is_pir(paddle.static.Program())


def layer(value: Any, index: int) -> Any:
    """Linear, BatchNorm, Tanh; a dropout now and then, and what splits and joins lists."""
    value = nn.Linear(value.shape[1], WIDTH)(value)
    value = nn.functional.tanh(nn.BatchNorm1D(WIDTH)(value))
    if index % 3 == 1:
        value = nn.functional.dropout(value, 0.3)
    left, right = paddle.split(value, 2, axis=1)
    return paddle.concat([right * 2.0, left], axis=1)


def deep(checkpoints: list[Any]) -> Sequence[Any]:
    """Two stages of six layers; the second layer of each three ends in a checkpoint."""
    with device_guard("gpu:0"):
        value, label = data()
    for stage in range(2):
        with device_guard(f"gpu:{stage}"):
            for index in range(LAYERS):
                value = layer(value, index)
                if index % 3 == 1:
                    checkpoints.append(value)
    with device_guard("gpu:1"):
        logits = nn.Linear(WIDTH, CLASSES)(value)
        return [nn.functional.cross_entropy(logits, label), logits]


def without(strategy: Any, optimizer: Any, checkpoints: list[Any]) -> Any:
    return optimizer


def by_strategy(strategy: Any, optimizer: Any, checkpoints: list[Any]) -> Any:
    strategy.recompute = True
    strategy.recompute_configs = {"checkpoints": [name_of(value) for value in checkpoints]}
    return optimizer


def by_optimizer(strategy: Any, optimizer: Any, checkpoints: list[Any]) -> Any:
    wrapped = RecomputeOptimizer(optimizer)
    wrapped._set_checkpoints([name_of(value) for value in checkpoints])
    return wrapped


@contextmanager
def minimized(mark: Call, build: Call = deep, **own: Any) -> Iterator[Any]:
    """A network as a pipeline that was started; yields its executor and its fetches."""
    with static_mode():
        paddle.seed(7)
        strategy = strategy_of(**own)
        fleet.init(is_collective=True, strategy=strategy)
        checkpoints: list[Any] = []
        fetches = build(checkpoints)
        optimizer = mark(strategy, paddle.optimizer.Momentum(0.1, 0.9), checkpoints)
        exe = executor_of(fetches[0], strategy, optimizer)
        yield exe, fetches


def trained(mark: Call, fetch: int, **own: Any) -> tuple[list[bytes], dict[str, np.ndarray]]:
    with minimized(mark, **own) as (exe, fetches):
        found = [exe.run(feed=feed, fetch_list=fetches[:fetch]) for feed in batches(3)]
        return [value.tobytes() for values in found for value in values], state_dict()


# A backward that is split computes again what it needs, and all, in its first half.
SPLIT = [(by_strategy, "ZBH1")] if is_pir(paddle.static.Program()) else []


@pytest.mark.parametrize(
    ("mark", "schedule"), [(by_optimizer, "F-then-B"), (by_strategy, "1F1B"), *SPLIT]
)
def test_recompute_changes_no_bit(mark: Call, schedule: str) -> None:
    expected, expected_state = trained(without, 2, schedule=schedule)
    found, state = trained(mark, 2, schedule=schedule)
    assert found == expected
    assert_same(state, expected_state)
    assert len(set(found)) == len(found)


def held_bytes(exe: Any, fetches: Sequence[Any]) -> list[int]:
    """Bytes that each stage keeps of a micro-batch between its forward and its backward."""
    exe.run(feed=batches(1)[0], fetch_list=fetches)
    stage = pipeline_of()._compiled.stage
    found = dict.fromkeys(stage._runners, 0)
    release = stage.release

    def measured(number: int, micro_batch: int) -> None:
        kept, _ = stage._kept[number, micro_batch]
        tensors = [tensor for tensor in kept.values() if not isinstance(tensor, list)]
        found[number] = sum(np.array(tensor).nbytes for tensor in tensors)
        release(number, micro_batch)

    stage.release = measured
    exe.run(feed=batches(1)[0], fetch_list=fetches)
    return list(found.values())


def held(mark: Call) -> list[int]:
    with minimized(mark) as (exe, fetches):
        return held_bytes(exe, fetches)


def test_less_is_kept() -> None:
    whole, marked = held(without), held(by_strategy)
    assert all(2 * few < many for few, many in zip(marked, whole)), (marked, whole)


def test_a_checkpoint_has_the_name_that_a_script_gives() -> None:
    with static_mode():
        value = paddle.exp(paddle.static.data("x", [-1, 2]))
        name = name_of(value)
        assert name_of(value) == name
        assert name_of(paddle.exp(value)) != name
        assert name_of(paddle.static.data("z", [1])) == "z"


def test_a_named_value_can_be_fetched_by_its_name() -> None:
    with static_mode():
        strategy = strategy_of()
        fleet.init(is_collective=True, strategy=strategy)
        loss, logits = deep([])
        name = name_of(logits)
        exe = executor_of(loss, strategy)
        assert exe.run(feed=batches(1)[0], fetch_list=[name])[0].shape == (2 * MICRO_BATCHES, 4)


@pytest.mark.parametrize(
    ("configs", "words"),
    [
        ({"checkpoints": []}, "no checkpoint is named"),
        ({"checkpoints": ["nothing"]}, "no value 'nothing'"),
        ({"checkpoints": ["x"], "enable_offload": True}, "offloads nothing"),
    ],
)
def test_recompute_that_cannot_be(configs: dict[str, Any], words: str) -> None:
    def mark(strategy: Any, optimizer: Any, checkpoints: list[Any]) -> Any:
        strategy.recompute = True
        strategy.recompute_configs = configs
        return optimizer

    with pytest.raises(ConfigError, match=words), minimized(mark):
        pass


def test_what_backward_takes_for_its_shape_is_kept_as_a_shape() -> None:
    def three_layers(checkpoints: list[Any]) -> Sequence[Any]:
        with device_guard("gpu:0"):
            value = paddle.static.data("x", [-1, FEATURES])
            for _ in range(3):
                value = nn.functional.tanh(nn.Linear(value.shape[1], WIDTH)(value))
        with device_guard("gpu:1"):
            return [paddle.mean(nn.Linear(WIDTH, 1)(value))]

    with minimized(without, three_layers) as (exe, fetches):
        # What goes into stage 0 and what comes out of its tanhs; not the products before the bias.
        assert held_bytes(exe, fetches)[0] == 4 * 2 * (FEATURES + 3 * WIDTH)
