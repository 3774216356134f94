"""Defines ``distributed_model``, ``distributed_optimizer`` and ``distributed_scaler``.

They wrap a user's objects for a pipeline.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, overload

from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionLayer

from fleetpipe.aliases import DType
from fleetpipe.config import PipelineConfig, scale_strategy
from fleetpipe.dygraph import (
    PipelineLayer,
    PipelineOptimizer,
    PipelineParallel,
    tensor_parallel,
    wrap,
)
from fleetpipe.dygraph.optimizer.optimizer import make_ranks_agree
from fleetpipe.errors import ConfigError
from fleetpipe.fleet._library_options import refuse_library_options
from fleetpipe.fleet.lifecycle import begin_static
from fleetpipe.fleet.static_graph import static_graph
from fleetpipe.job import meeting
from fleetpipe.job.job import current_job
from fleetpipe.paddle_api import paddle, paddle_fleet
from fleetpipe.paddle_api.distributed import install_topology, user_strategy
from fleetpipe.paddle_api.layer import recompute_without_reentrance, wrapped_layer
from fleetpipe.paddle_types import DistributedStrategy, GradScaler, Layer, Optimizer


@overload
def distributed_model(model: PipelineLayer) -> PipelineParallel: ...


@overload
def distributed_model(model: Layer) -> Layer: ...


def distributed_model(model: Any) -> Any:
    """Wraps a model for training. Collective over the job.

    Args:
        model: The model that every rank built: a ``PipelineLayer``, or without a pipeline any
            ``nn.Layer``.

    Returns:
        For a ``PipelineLayer`` a :class:`~fleetpipe.dygraph.PipelineParallel` of the type that
        Fleet would choose: ``NoPipelineParallel`` if pp_degree is 1. Any other model is returned
        unchanged in a job of one process, else wrapped for the ranks that share it.

    Raises:
        ConfigError: ``pp_degree`` is above 1 and the model is no ``PipelineLayer`` of fleetpipe's,
            or sums by trees are on and it has replicas; it is wrapped already, or a library's
            model has an option that does not run here.
        PipelineTimeout: A rank did not arrive within the limit.
    """
    job = current_job()
    if isinstance(model, MixPrecisionLayer) and isinstance(wrapped_layer(model), PipelineLayer):
        # The wrapper's hooks are on the parameters: it is not needed any more.
        model = wrapped_layer(model)
    if isinstance(model, PipelineLayer):
        refuse_library_options(model)
        return wrap(_cast_to_pure_half(model))
    if isinstance(model, PipelineParallel):
        raise ConfigError(
            "this model has been wrapped already",
            got=type(model).__name__,
            fix="call fleet.distributed_model once, on the PipelineLayer (here model.layers)",
        )
    if job is not None and job.degrees.pp > 1:
        is_paddles = isinstance(model, paddle_fleet.meta_parallel.PipelineLayer)
        raise ConfigError(
            f"pp_degree={job.degrees.pp} needs a PipelineLayer",
            got=f"{type(model).__module__}.{type(model).__name__}",
            cause="this class was made on Paddle's PipelineLayer, which was imported before "
            "fleetpipe stood in its place"
            if is_paddles
            else None,
            fix="from fleetpipe.fleet.meta_parallel import PipelineLayer; where a library imports "
            "it, start the script with fleetpipe run, or with import fleetpipe; fleetpipe.install()"
            if is_paddles
            else "wrap fleetpipe.pipeline(model, example_inputs), which makes a pipeline of any "
            "layer, or write the model as PipelineLayer(layers=[LayerDesc(..), ..])",
        )
    if meeting.world_size() == 1:
        return model
    if job is None:
        return paddle_fleet.distributed_model(model)
    if job.sums_by_tree and job.degrees.split("dp", "sharding") > 1:
        raise ConfigError(
            "sums by a tree need a PipelineLayer where a model has replicas",
            got=f"{type(model).__name__}, dp_degree={job.degrees.dp}, "
            f"sharding_degree={job.degrees.sharding}",
            cause="the script calls backward itself, and its micro-batches add up as they come",
            fix="wrap PipelineLayer(layers=[LayerDesc(..), ..]), or leave 'sums' out of "
            "strategy.fleetpipe_configs",
        )
    if job.degrees.split("mp", "cp", "ep") > 1:
        return tensor_parallel.TensorParallel(model, job.hcg, strategy=user_strategy())
    with job.guarded(lambda: "wrapping the model"):
        # Gloo gives up after 30 s: nobody enters it before all ranks are here.
        job.require_agreement({"the model to wrap": type(model).__name__})
        return recompute_without_reentrance(paddle_fleet.distributed_model(model))


def _cast_to_pure_half(model: PipelineLayer) -> Any:
    """Returns a model, cast to pure float16 or bfloat16 if ``strategy.amp`` asks for that."""
    strategy = user_strategy()
    if strategy is None or not strategy.amp:
        return model
    option_by_dtype: dict[DType, str] = {"float16": "use_pure_fp16", "bfloat16": "use_pure_bf16"}
    for dtype, option in option_by_dtype.items():
        if strategy.amp_configs.get(option):
            return paddle.amp.decorate(models=model, level="O2", dtype=dtype)
    return model


def distributed_optimizer(
    optimizer: Optimizer, strategy: DistributedStrategy | None = None
) -> PipelineOptimizer:
    """Wraps an optimizer for ``train_batch``, or in static graph for ``minimize``.

    In dynamic graph without a job, and in static graph without ``strategy.pipeline``, Paddle's own
    function wraps it.

    Args:
        optimizer: Any Paddle optimizer, in dynamic graph built on ``model.parameters()``.
        strategy: Replaces the strategy given to ``fleet.init``.

    Returns:
        A :class:`~fleetpipe.dygraph.PipelineOptimizer`, in static graph a
        :class:`~fleetpipe.static.StaticOptimizer` (which to a type checker is the former).

    Raises:
        ConfigError: The optimizer would be wrong on several ranks; or a static program has several
            stages, and ``strategy.pipeline`` is False.
    """
    wrapped: PipelineOptimizer = _wrap_optimizer(optimizer, strategy)
    return wrapped


def _wrap_optimizer(optimizer: Optimizer, strategy: DistributedStrategy | None) -> Any:
    """Returns the wrapped optimizer; the arguments are those of :func:`distributed_optimizer`."""
    if not paddle.in_dynamic_mode():
        chosen = user_strategy() if strategy is None else strategy
        if getattr(chosen, "pipeline", False):
            begin = functools.partial(begin_static, chosen)
            return static_graph().StaticOptimizer(optimizer, chosen, begin, meeting.world_size())
        static_graph().refuse_stages(paddle.static.default_main_program())
        return paddle_fleet.distributed_optimizer(optimizer, strategy)
    job = current_job()
    if job is None:
        return paddle_fleet.distributed_optimizer(optimizer, strategy)
    if strategy is not None:
        if any(reference() is not None for reference in job.pipelines):
            _require_same_options(strategy)
        install_topology(job.hcg, copy.deepcopy(strategy))
    return PipelineOptimizer(optimizer)


def _require_same_options(strategy: Any) -> None:
    """Refuses a strategy whose options differ from those with which a model was wrapped."""

    def options(of: Any) -> tuple[PipelineConfig, Any, Any]:
        configs = of.hybrid_configs["pp_configs"]
        return PipelineConfig.from_strategy(of), scale_strategy(of), configs

    earlier = user_strategy()
    if options(earlier) != options(strategy):
        raise ConfigError(
            "distributed_optimizer was given other options than the model that is wrapped has",
            expected=str(PipelineConfig.from_strategy(earlier)),
            got=str(PipelineConfig.from_strategy(strategy)),
            fix="give this strategy to fleet.init, or call distributed_optimizer before "
            "distributed_model",
        )


def distributed_scaler(scaler: GradScaler) -> GradScaler:
    """Makes all ranks of a ``GradScaler`` agree on an overflow: all step, or none.

    Args:
        scaler: A ``paddle.amp.GradScaler``, which is changed in place. One that is switched off, as
            on a CPU, stays as it is.

    Returns:
        ``scaler``.
    """
    agreed: GradScaler = (
        make_ranks_agree(scaler) if current_job() else paddle_fleet.distributed_scaler(scaler)
    )
    return agreed
