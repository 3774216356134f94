"""Refuses, on a CPU, Paddle's other pipelines and shardings, which fail there.

A script's call raises an error before any rank waits; the error says what to use instead.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from fleetpipe.errors import ConfigError
from fleetpipe.paddle_api import VERSION, replaced
from fleetpipe.paddle_api.device import device_kind

_SHARDING = "paddle.distributed.fleet.meta_parallel.sharding"
_INTERMEDIATE = "paddle.distributed.auto_parallel.intermediate"
#: Classes of sharding, by the modules below ``_SHARDING``, with the stage of each.
_CLASSES = {
    "group_sharded_optimizer_stage2.GroupShardedOptimizerStage2": 2,
    "group_sharded_stage2.GroupShardedStage2": 2,
    "group_sharded_stage3.GroupShardedStage3": 3,
}
#: The stage of each ``level`` of ``group_sharded_parallel``.
_LEVELS = {"os": 1, "os_g": 2, "p_g_os": 3}


def _refuse_sharding(name: str, stage: int) -> NoReturn:
    """Refuses a function or class of Paddle's that needs sharding of the stage ``stage``."""
    if stage == 3:
        fix = (
            "raise pp_degree or mp_degree, each rank of which holds its part of the parameters "
            "alone; sharding_configs = {'stage': 2} shards gradients and the optimizer's state"
        )
    else:
        fix = (
            "fleet.init with hybrid_configs['sharding_degree'], strategy.sharding = True and "
            f"strategy.sharding_configs = {{'stage': {stage}}}; then fleet.distributed_model and "
            "fleet.distributed_optimizer"
        )
    raise ConfigError(f"{name} does not run on a CPU", got=f"stage {stage} of sharding", fix=fix)


def _refuse_pp_config(model: Any, optimizer: Any = None, config: Any = None) -> NoReturn:
    """Raises the error for ``pp_config`` of ``dist.parallelize``, in place of Paddle's function."""
    spec = (config or {}).get("split_spec")
    raise ConfigError(
        "pp_config of dist.parallelize does not run on a CPU",
        got=f"split_spec={spec!r}",
        cause="it runs one stage after another, without micro-batches, and sends values in a way "
        "that ends the process there",
        fix="model = fleet.distributed_model(fleetpipe.pipeline(model, example_inputs, loss_fn=.., "
        f"split_spec={spec!r})), then model.train_batch; a global_spec is not needed: what several "
        "stages use goes to each of them",
    )


def _engine_constructor(stock: Callable[..., None]) -> Callable[..., None]:
    """Returns a constructor of static graph's ``Engine`` that refuses ``pipeline.enable``."""

    @functools.wraps(stock)
    def construct(*arguments: Any, **options: Any) -> None:
        """Refuses a strategy with ``pipeline.enable``; else calls the constructor."""
        strategy = inspect.signature(stock).bind(*arguments, **options).arguments.get("strategy")
        if strategy is not None and strategy.pipeline.enable:
            raise ConfigError(
                "pipeline.enable of a dist.Strategy does not run on a CPU",
                got=f"schedule_mode={strategy.pipeline.schedule_mode!r}",
                fix="in dynamic graph fleetpipe.pipeline(model, example_inputs, split_spec=..); in "
                "static graph device_guard and a DistributedStrategy with pipeline = True and "
                "pipeline_configs",
            )
        stock(*arguments, **options)

    return construct


@contextmanager
def refusals() -> Iterator[None]:
    """Opens a context in which Paddle's other pipelines and shardings raise errors on a CPU."""
    if device_kind() != "cpu":
        yield
        return
    sharding = importlib.import_module("paddle.distributed.sharding")
    engine = importlib.import_module("paddle.distributed.auto_parallel.static.engine").Engine

    def refuse_level(model: Any, optimizer: Any, level: str, *_: Any, **__: Any) -> NoReturn:
        """Raises the error for a level of ``group_sharded_parallel``, in place of Paddle's."""
        _refuse_sharding("group_sharded_parallel", _LEVELS.get(level, 1))

    names: list[tuple[object, str, object]] = [
        (sharding, "group_sharded_parallel", refuse_level),
        (engine, "__init__", _engine_constructor(engine.__init__)),
    ]
    for path, stage in _CLASSES.items():
        module, _, name = path.partition(".")
        owner = getattr(importlib.import_module(f"{_SHARDING}.{module}"), name)
        refuse = functools.partial(_refuse_sharding, name, stage)
        names.append((owner, "__init__", lambda *_, refuse=refuse, **__: refuse()))
    if not VERSION.startswith("2."):
        cutting = importlib.import_module(f"{_INTERMEDIATE}.parallelize")
        names.append((cutting, "pipeline_parallel", _refuse_pp_config))
    with replaced(*names):
        yield
