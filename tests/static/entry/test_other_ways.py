"""Other ways to train than one ``minimize`` and ``exe.run`` of the program itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest

from fleetpipe import fleet
from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api.static import is_pir
from fleetpipe.static import state_dict
from tests.jobs import begun
from tests.static.networks import batches, executor_of, mlp, static_mode, strategy_of

OLDER = not is_pir(paddle.static.Program())


def clone(main: Any, exe: Any) -> object:
    return exe.run(main.clone(), feed=batches(1)[0])


def parsed(main: Any, exe: Any) -> object:
    again = paddle.static.Program.parse_from_string(main.desc.serialize_to_string())
    return exe.run(again, feed=batches(1)[0])


def compiled_clone(main: Any, exe: Any) -> object:
    return exe.run(paddle.static.CompiledProgram(main.clone()), feed=batches(1)[0])


def dataset(main: Any, exe: Any) -> object:
    return exe.train_from_dataset(main, None)


def minimized_again(main: Any, exe: Any) -> object:
    loss = main.global_block().all_parameters()[0]
    with paddle.static.device_guard("gpu:1"):
        loss = paddle.mean(loss)
    optimizer = fleet.distributed_optimizer(paddle.optimizer.SGD(0.1), strategy_of())
    return optimizer.minimize(loss)


def counted(main: Any, exe: Any) -> object:
    count = paddle.static.create_parameter([1], "float32")
    paddle.assign(count + 1.0, output=count)
    return exe.run(main, feed=batches(1)[0])


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (clone, "made after minimize trains nothing"),
        (dataset, "takes no dataset"),
        (minimized_again, "was minimized before"),
        (counted, "appended to the program after minimize(?s:.*)test_other_ways"),
        *((way, "made after minimize trains nothing") for way in (parsed, compiled_clone) if OLDER),
    ],
)
def test_what_would_train_nothing_is_refused(way: Callable[[Any, Any], object], words: str) -> None:
    with static_mode(), begun(strategy_of()):
        exe = executor_of(mlp(2)()[0], strategy_of())
        with pytest.raises(ConfigError, match=words):
            way(paddle.static.default_main_program(), exe)


def test_what_is_no_way_to_train_runs_as_before() -> None:
    with static_mode(), begun(strategy_of()):
        loss = mlp(2)()[0]
        main = paddle.static.default_main_program()
        before = main.clone()
        exe = executor_of(loss, strategy_of())
        values = state_dict()
        names = [p.name for p in main.global_block().all_parameters()]
        first = next(p for p in before.global_block().all_parameters() if p.name == names[0])
        programs = [before, main.clone(for_test=True)] if OLDER else [before]
        for program in programs:
            (value,) = exe.run(program, feed=batches(1)[0], fetch_list=[first])
            np.testing.assert_array_equal(value, values[names[0]])
        if OLDER:
            exe.run(paddle.static.CompiledProgram(main), feed=batches(1)[0], fetch_list=[loss])
            assert any((values[name] != value).any() for name, value in state_dict().items())


def last(count: int) -> list[Any]:
    """The parameters of the last layer: a weight and a bias."""
    parameters = paddle.static.default_main_program().global_block().all_parameters()
    return sorted(parameters, key=lambda one: str(one.name))[-count:]


@pytest.mark.parametrize("by", ["optimizer", "minimize", "names", "parameter_list"])
def test_parameters_that_the_optimizer_lacks_are_not_trained(by: str) -> None:
    with static_mode(), begun(strategy_of()):
        loss = mlp(2)()[0]
        head = last(2)
        rate = paddle.optimizer.Momentum(0.1, 0.9, parameters=head if by == "optimizer" else None)
        chosen = {"minimize": head, "names": [one.name for one in head]}.get(by)
        optimizer = fleet.distributed_optimizer(rate, strategy_of())
        if by == "parameter_list":
            optimizer.minimize(loss, parameter_list=head)
        else:
            optimizer.minimize(loss, parameters=chosen, no_grad_set=set())
        exe = executor_of()
        before = state_dict()
        exe.run(feed=batches(1)[0])
        changed = {name for name, value in state_dict().items() if (value != before[name]).any()}
    assert changed == {one.name for one in head}


@pytest.mark.parametrize("wrap", ["LookAhead", "GradientMergeOptimizer"])
def test_optimizers_with_a_step_of_their_own_are_refused(wrap: str) -> None:
    made = getattr(paddle.incubate, wrap, None) or getattr(paddle.incubate.optimizer, wrap)
    with static_mode():
        fleet.init(is_collective=True, strategy=strategy_of())
        with pytest.raises(ConfigError, match=f"does not run {wrap}"):
            fleet.distributed_optimizer(made(paddle.optimizer.SGD(0.1)), strategy_of())
