"""What needs a GPU is refused on a CPU where it is asked for, and says what to use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import paddle
import paddle.distributed as dist
import pytest
from paddle import nn
from paddle.distributed import auto_parallel, sharding

import fleetpipe
from fleetpipe.errors import ConfigError
from fleetpipe.launch.substitution import in_place_of_paddles
from fleetpipe.paddle_api.device import device_kind

pytestmark = pytest.mark.skipif(device_kind() != "cpu", reason="on a GPU they are Paddle's own")


@pytest.fixture(autouse=True)
def substituted() -> Iterator[None]:
    with in_place_of_paddles():
        yield


def model_and_optimizer() -> tuple[Any, Any]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return model, paddle.optimizer.AdamW(0.1, parameters=model.parameters())


@pytest.mark.parametrize(
    ("level", "advice"), [("os", "'stage': 1"), ("os_g", "'stage': 2"), ("p_g_os", "pp_degree")]
)
def test_sharding_of_groups(level: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        sharding.group_sharded_parallel(*model_and_optimizer(), level)


@pytest.mark.parametrize("name", ["Stage2", "OptimizerStage2", "Stage3"])
def test_its_classes(name: str) -> None:
    module = {"OptimizerStage2": "optimizer_stage2"}.get(name, name.lower())
    path = f"paddle.distributed.fleet.meta_parallel.sharding.group_sharded_{module}"
    kind = getattr(importlib.import_module(path), f"GroupSharded{name}")
    with pytest.raises(ConfigError, match=f"GroupSharded{name} does not run on a CPU"):
        kind(*model_and_optimizer())


@pytest.mark.skipif(not hasattr(dist, "SplitPoint"), reason="2.6.2 has no dist.parallelize")
def test_a_cut_of_parallelize_is_refused_and_taken_by_pipeline() -> None:
    spec = {"0": dist.SplitPoint.END}
    model, optimizer = model_and_optimizer()
    with pytest.raises(ConfigError, match=r"(?s)pp_config.*fleetpipe\.pipeline"):
        dist.parallelize(model, optimizer, config={"pp_config": {"split_spec": spec}})
    example = paddle.ones([2, 4])
    cut = fleetpipe.pipeline(model, example, split_spec=spec, num_stages=2, verify=False)
    own = fleetpipe.pipeline(
        model, example, split_spec={"0": fleetpipe.SplitPoint.END}, num_stages=2, verify=False
    )
    assert cut.segment_parts == own.segment_parts
    assert dist.parallelize(model, optimizer, config={})[0] is model


def _engine(*arguments: Any, **options: Any) -> Any:
    name = "paddle.distributed.auto_parallel.static.engine"
    return importlib.import_module(name).Engine(*arguments, **options)


def _to_static(model: Any, loss: Any, optimizer: Any, strategy: Any) -> Any:
    return dist.to_static(model, None, loss, optimizer, strategy)


@pytest.mark.parametrize("build", [_engine, _to_static])
def test_a_pipeline_of_static_auto_parallel(build: Callable[..., Any]) -> None:
    strategy = dist.Strategy()
    strategy.pipeline.enable = True
    model, optimizer = model_and_optimizer()
    with pytest.raises(ConfigError, match=r"(?s)pipeline\.enable.*device_guard"):
        build(model, nn.MSELoss(), optimizer, strategy=strategy)
    if not paddle.device.is_compiled_with_cuda():  # else Paddle asks the driver for its version
        _engine(model, nn.MSELoss(), optimizer, strategy=auto_parallel.Strategy())
