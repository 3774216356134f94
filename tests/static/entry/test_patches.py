"""The hooks of static graph: what they take over and give back, and other ways to train."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.base import framework
from paddle.static import device_guard

from fleetpipe import fleet
from fleetpipe.errors import ConfigError, ScheduleError, StateError
from fleetpipe.paddle_api.static import is_pir
from fleetpipe.static import StaticOptimizer, install, pipeline_of, state_dict, uninstall
from tests.pipelines import begun
from tests.static.networks import batches, executor_of, mlp, static_mode, strategy_of

OLDER = not is_pir(paddle.static.Program())


def places() -> list[Any]:
    """What is hooked where guards mark nothing by themselves, as it is now."""
    saving = ("save", "load", "save_inference_model")
    return [
        paddle.static.Executor.run,
        framework.switch_device,
        *(getattr(where, name) for where in (paddle.static, paddle.static.io) for name in saving),
    ]


def test_shutdown_takes_the_hooks_back_and_init_puts_them_in() -> None:
    uninstall()
    stock = places()
    install()
    install()
    hooked = paddle.static.Executor.run
    assert hooked is not stock[0]
    assert hooked.__wrapped__ is stock[0]
    with static_mode():
        fleet.init(is_collective=True, strategy=strategy_of())
        fleet.shutdown()
        assert places() == stock
        fleet.init(is_collective=True, strategy=strategy_of())
        assert paddle.static.Executor.run is not stock[0]
        fleet.shutdown()


def test_a_program_without_a_pipeline_runs_as_before() -> None:
    with static_mode():
        x = paddle.static.data("x", [-1, 2])
        y = nn.functional.relu(x)
        exe = executor_of()
        fed = np.array([[-1.0, 2.0]], "float32")
        assert exe.run(feed={"x": fed}, fetch_list=[y])[0].tolist() == [[0.0, 2.0]]
        (tensor,) = exe.run(
            paddle.static.default_main_program(), {"x": fed}, [y], return_numpy=False
        )
        assert np.array(tensor).tolist() == [[0.0, 2.0]]
        with pytest.raises(StateError, match="no pipeline"):
            pipeline_of()


def test_a_program_in_stages_needs_the_switch() -> None:
    with static_mode(), begun():
        sgd = paddle.optimizer.SGD(0.1)
        assert not isinstance(fleet.distributed_optimizer(sgd), StaticOptimizer)
        mlp(2)()
        with pytest.raises(ConfigError, match=r"strategy\.pipeline is False(?s:.*)of stage 1"):
            fleet.distributed_optimizer(sgd, fleet.DistributedStrategy())


def minimized(strategy: Any, build: Any = None) -> Any:
    fetches = (build or mlp(2))()
    fleet.distributed_optimizer(paddle.optimizer.SGD(0.1), strategy).minimize(fetches[0])
    return fetches


def test_the_strategy_may_come_after_init_and_a_pipeline_ends_with_its_job() -> None:
    with static_mode():
        with begun():
            loss = minimized(strategy_of())[0]
            exe = executor_of()
            assert exe.run(feed=batches(1)[0], fetch_list=[loss])[0] > 0
            hcg = fleet.get_hybrid_communicate_group()
            assert hcg.get_pipe_parallel_world_size() == 2
        install()
        with pytest.raises(StateError, match="job that this pipeline belongs to has ended"):
            exe.run(feed=batches(1)[0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "Seq1F1B"}, "cuts sequences into slices"),
        ({"schedule": "1F2B"}, "there is no schedule"),
        ({"guards": 10}, "guards is for dynamic graph"),
        ({"order": "ready"}, "order is for dynamic graph"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], words: str) -> None:
    with static_mode(), begun(), pytest.raises(ConfigError, match=words):
        minimized(strategy_of(**options))


def test_a_memory_cap_in_bytes_is_compared_with_bytes() -> None:
    costs = {"forward": [1, 1], "bytes": [100, 50]}
    for cap, schedule in ((250, "1F1B"), (399, "FThenB"), (400, "FThenB")):
        with static_mode():
            strategy = strategy_of(schedule, memory_cap=cap, costs=costs)
            fleet.init(is_collective=True, strategy=strategy)
            if cap == 399:
                with pytest.raises(ScheduleError, match=r"at most 399 bytes[\s\S]*400 at the peak"):
                    minimized(strategy)
            else:
                minimized(strategy)


def test_switches_that_are_refused() -> None:
    for switch in ("amp", "gradient_merge", "sharding"):
        strategy = strategy_of()
        setattr(strategy, switch, True)
        refused = pytest.raises(ConfigError, match=rf"strategy\.{switch} in a static pipeline")
        with static_mode(), begun(), refused:
            minimized(strategy)


def test_optimizers_that_do_more_than_update_are_refused() -> None:
    with static_mode():
        strategy = strategy_of()
        fleet.init(is_collective=True, strategy=strategy)
        optimizer = paddle.static.amp.decorate(paddle.optimizer.SGD(0.1))
        refused = r"static\.amp\.decorate in a static pipeline"
        with pytest.raises(ConfigError, match=refused):
            fleet.distributed_optimizer(optimizer, strategy)
        ours = fleet.distributed_optimizer(paddle.optimizer.SGD(0.1), strategy)
        with pytest.raises(ConfigError, match=refused):
            paddle.static.amp.decorate(ours)
        for kind in ("LookAhead", "GradientMergeOptimizer"):
            wrap = getattr(paddle.incubate, kind, None) or getattr(paddle.incubate.optimizer, kind)
            with pytest.raises(ConfigError, match=f"does not run {kind}"):
                fleet.distributed_optimizer(wrap(paddle.optimizer.SGD(0.1)), strategy)


def test_parts_of_minimize_are_refused() -> None:
    with static_mode(), begun():
        optimizer = fleet.distributed_optimizer(paddle.optimizer.SGD(0.1), strategy_of())
        for name in ("backward", "apply_gradients", "apply_optimize", "step"):
            words = rf"has no {name} of its own(?s:.*)\.minimize\(loss\)"
            with pytest.raises(ConfigError, match=words):
                getattr(optimizer, name)
        assert optimizer.get_lr() == 0.1


def rowwise() -> Any:
    with device_guard("gpu:0"):
        hidden = nn.Linear(6, 8)(paddle.static.data("x", [-1, 6]))
    with device_guard("gpu:1"):
        return [paddle.mean(nn.Linear(8, 2)(hidden), axis=1)]


@pytest.mark.skipif(OLDER, reason="the older Program has it")
def test_clipping_by_value_that_paddle_lacks_is_refused() -> None:
    with static_mode(), begun():
        optimizer = paddle.optimizer.SGD(0.1, grad_clip=nn.ClipGradByValue(0.1))
        with pytest.raises(ConfigError, match="no ClipGradByValue for PIR"):
            fleet.distributed_optimizer(optimizer, strategy_of()).minimize(mlp(2)()[0])


@pytest.mark.skipif(not OLDER, reason="PIR has none")
@pytest.mark.parametrize("attribute", ["gradient_clip_attr", "error_clip"])
def test_clips_of_the_programs_own_are_refused(attribute: str) -> None:
    with static_mode(), begun():
        main, loss = paddle.static.default_main_program(), mlp(2)()[0]
        if attribute == "error_clip":
            main.global_block().var("linear_0.w_0").error_clip = object()
        else:
            paddle.nn.clip.set_gradient_clip(nn.ClipGradByNorm(0.1))
        optimizer = fleet.distributed_optimizer(paddle.optimizer.SGD(0.1), strategy_of())
        with pytest.raises(ConfigError, match=rf"does not read the {attribute} of 'linear_0"):
            optimizer.minimize(loss)


def test_guards_of_the_layers_and_init_come_first() -> None:
    with static_mode():
        with pytest.raises(ConfigError, match="minimized after fleet"):
            minimized(strategy_of())
        strategy = fleet.DistributedStrategy()
        strategy.hybrid_configs = {"pp_degree": 2}
        with pytest.raises(ConfigError, match=r"strategy\.pipeline = True"):
            fleet.init(is_collective=True, strategy=strategy)
        fleet.shutdown()


def through_control_flow() -> Any:
    with device_guard("gpu:0"):
        hidden = nn.Linear(6, 8)(paddle.static.data("x", [-1, 6]))
    with device_guard("gpu:1"):
        mean = paddle.mean(hidden)
        more = paddle.static.nn.cond(mean > 0, lambda: paddle.tanh(hidden), lambda: hidden * 3.0)
        return [paddle.mean(more)]


def sparse() -> Any:
    with device_guard("gpu:0"):
        code = nn.Embedding(4, 8, sparse=True)(paddle.static.data("y", [-1, 1], "int64"))
    with device_guard("gpu:1"):
        return [paddle.mean(nn.Linear(8, 2)(code))]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (through_control_flow, "through control flow"),
        *([(sparse, "is sparse")] if OLDER else []),  # under PIR this gradient is dense
        (rowwise, r"one element(?s:.*)shape \[-1\](?s:.*)paddle\.mean"),
    ],
)
def test_what_a_pipeline_cannot_cut(build: Any, words: str) -> None:
    with static_mode(), begun(strategy_of()):
        with pytest.raises(ValueError, match=words) as caught:
            minimized(strategy_of(), build)
        if build is through_control_flow:
            place = rf"operation '\S+' \({re.escape(__file__)}, line \d+\)"
            assert re.search(place, str(caught.value))


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
        (counted, "appended to the program after minimize(?s:.*)test_patches"),
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
