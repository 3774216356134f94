"""What Fleet's strategy promises, and what of its setters is not so here."""

from __future__ import annotations

import copy
from typing import Any

import paddle
import pytest

from fleetpipe import fleet
from fleetpipe.config import PipelineConfig
from fleetpipe.errors import ConfigError
from fleetpipe.fleet import strategy as strategies
from tests.fixtures import Patch
from tests.pipelines import batch, job, pipeline, sgd


def given() -> dict[str, Any]:
    return {
        "pp_degree": 2,
        "mp_configs": {"sync_param": True},
        "pp_configs": {"delay_scale_loss": True},
        "order": ["pp", "dp", "sharding", "sep", "mp"],
    }


def test_the_mapping_that_is_given_stays_whole() -> None:
    # Paddle's own setter takes pp_configs and mp_configs out of it.
    configs = given()
    for _ in range(2):
        strategy = fleet.DistributedStrategy()
        strategy.hybrid_configs = configs
        assert configs == given()
        assert strategy.hybrid_configs["pp_degree"] == 2
        assert strategy.hybrid_configs["pp_configs"].delay_scale_loss
        assert strategy.hybrid_configs["mp_configs"].sync_param
        assert strategy.hybrid_parallel_order == given()["order"]


def test_a_protobuf_that_is_too_new_for_paddle_is_named(monkeypatch: Patch) -> None:
    def unreadable(_: object) -> Any:
        # Paddle 2.6.2 and 3.0 to 3.2 under protobuf 7.
        raise AttributeError("'FieldDescriptor' object has no attribute 'label'")

    monkeypatch.setattr(strategies, "_paddle_properties", {"hybrid_configs": property(unreadable)})
    strategy = fleet.DistributedStrategy()
    with pytest.raises(ConfigError, match="protobuf is too new") as caught:
        strategy.hybrid_configs = given()
    assert f"got: Paddle {paddle.version.full_version}, protobuf " in str(caught.value)
    assert "pip install 'protobuf<7'" in str(caught.value)


def test_setting_merges_and_nested_options_are_alive() -> None:
    strategy = fleet.DistributedStrategy()
    assert strategy.hybrid_configs["dp_degree"] == -1
    strategy.hybrid_configs = {"pp_degree": 2}
    strategy.hybrid_configs["pp_configs"].delay_scale_loss = True
    strategy.hybrid_configs = {"mp_degree": 4}
    assert strategy.hybrid_configs["pp_configs"].delay_scale_loss
    # But the mapping itself is new each time.
    strategy.hybrid_configs["pp_degree"] = 9
    found = strategy.hybrid_configs
    assert [found[f"{axis}_degree"] for axis in ("dp", "pp", "sharding", "sep", "mp")] == [
        -1, 2, 1, 1, 4,
    ]  # fmt: skip
    strategy.pipeline_configs = {"accumulate_steps": 8}
    strategy.pipeline_configs = {"micro_batch_size": 3}
    assert strategy.pipeline_configs == {
        "accumulate_steps": 8,
        "micro_batch_size": 3,
        "schedule_mode": "1F1B",
        "p2p_cache_shape": True,
        "enable_partial_send_recv": True,
    }


@pytest.mark.parametrize("group", ["hybrid_configs", "pipeline_configs", "fleetpipe_configs"])
@pytest.mark.parametrize("wrong", [None, "pp_degree=2", 2])
def test_what_is_no_mapping_of_options_is_refused(group: str, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{group} takes options by name(.|\n)*got: {wrong!r}"):
        setattr(fleet.DistributedStrategy(), group, wrong)


def test_unknown_options_are_refused_with_the_nearest() -> None:
    strategy = fleet.DistributedStrategy()
    with pytest.raises(ConfigError, match=r"'pp_dgree'(.|\n)*did you mean 'pp_degree'"):
        strategy.hybrid_configs = {"pp_dgree": 2}
    with pytest.raises(ConfigError, match=r"'acumulate_step'(.|\n)*mean 'accumulate_steps'"):
        strategy.pipeline_configs = {"acumulate_step": 2}
    with pytest.raises(ConfigError, match=r"another type(.|\n)*'4'"):
        strategy.pipeline_configs = {"accumulate_steps": "4"}
    with pytest.raises(ConfigError, match=r"dp_degree must be .* at least -1"):
        strategy.hybrid_configs = {"dp_degree": "2"}
    with pytest.raises(ConfigError, match=r"'post_validation'(.|\n)*leave it out: ranks wait"):
        strategy.fleetpipe_configs = {"post_validation": True}
    named = r"a value of another type(.|\n)*hybrid_configs\['sharding_configs'\].comm_overlap"
    with pytest.raises(ConfigError, match=named):
        strategy.hybrid_configs = {"sharding_configs": {"comm_overlap": True}}
    # Scripts still give an option that Paddle had once.
    strategy.hybrid_configs = {"pp_configs": {"non_batch_p2p_comm": True, "enable_timer": True}}
    assert strategy.hybrid_configs["pp_configs"].enable_timer


def delayed() -> Any:
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, **given()}
    strategy.pipeline_configs = {"accumulate_steps": 4, "micro_batch_size": 2}
    return strategy


@pytest.mark.parametrize(
    "change",
    [
        lambda: fleet.init(is_collective=True, strategy=delayed()),
        lambda: fleet.distributed_optimizer(
            paddle.optimizer.SGD(parameters=paddle.nn.Linear(1, 1).parameters()), delayed()
        ),
    ],
    ids=["init", "distributed_optimizer"],
)
def test_a_later_strategy_holds_for_the_models_that_follow(change: Any) -> None:
    gradients = []
    for changed in (False, True):
        with job(2):
            if changed:
                change()
            model = pipeline()
            model.forward_backward_pipeline(batch())
            gradients.append([parameter.grad.numpy() for parameter in model.parameters()])
            assert float(model.train_batch(batch(), sgd(model))) > 0
    # Not yet divided by accumulate_steps, under delay_scale_loss.
    assert all((4 * one == other).all() for one, other in zip(*gradients))


def test_a_strategy_that_comes_after_the_model_is_refused_where_it_differs() -> None:
    with job(2):
        model = pipeline()
        optimizer, same = sgd(model)._inner_opt, copy.deepcopy(fleet.fleet._user_defined_strategy)
        fleet.distributed_optimizer(optimizer, same)
        with pytest.raises(ConfigError, match="before distributed_model"):
            fleet.distributed_optimizer(optimizer, delayed())


def test_the_scale_of_gradients_is_checked_by_init() -> None:
    strategy = delayed()
    strategy.gradient_scale_configs = {"scale_strategy": "xx"}
    with pytest.raises(ConfigError, match="scale_strategy"):
        fleet.init(is_collective=True, strategy=strategy)


@pytest.mark.parametrize("wrong", [True, False, 0, -1, float("nan"), float("inf"), "60", "soon"])
def test_a_timeout_that_is_no_number_of_seconds_is_refused(wrong: Any) -> None:
    strategy = fleet.DistributedStrategy()
    strategy.fleetpipe_configs = {"timeout": wrong}
    with pytest.raises(ConfigError, match=rf"number of seconds above 0\n  got: {wrong!r}\n"):
        fleet.init(is_collective=True, strategy=strategy)


@pytest.mark.parametrize("value", [9100, "0.0.0.0:9100", "[::1]:9100"])
def test_where_a_job_is_served_stays_text(value: Any, monkeypatch: Patch) -> None:
    monkeypatch.setenv("FLEETPIPE_SERVE", str(value))
    served = PipelineConfig.from_strategy(None).serve
    assert served == (f"127.0.0.1:{value}" if value == 9100 else value)
    monkeypatch.setenv("FLEETPIPE_SERVE", "soon")
    with pytest.raises(ConfigError, match="served at a port, or at HOST:PORT\n  got: 'soon'"):
        PipelineConfig.from_strategy(None)


@pytest.mark.parametrize("text", ["0", "nan", "soon", ""])
def test_a_timeout_of_the_environment_is_a_number_too(text: str, monkeypatch: Patch) -> None:
    monkeypatch.setenv("FLEETPIPE_TIMEOUT", "7.5")
    assert PipelineConfig.from_strategy(None).timeout == 7.5
    monkeypatch.setenv("FLEETPIPE_TIMEOUT", text)
    with pytest.raises(ConfigError, match="FLEETPIPE_TIMEOUT must be a number of seconds above 0"):
        PipelineConfig.from_strategy(None)
