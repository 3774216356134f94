"""``distributed_model`` and ``distributed_optimizer``: from the user's objects to a pipeline's."""

from __future__ import annotations

import copy
import functools
from typing import Any

from fleetpipe import _paddle, arrival
from fleetpipe._paddle import paddle, paddle_fleet
from fleetpipe.dygraph import (
    PipelineLayer,
    PipelineOptimizer,
    PipelineParallel,
    refuse_partial_norm,
)
from fleetpipe.errors import ConfigError
from fleetpipe.fleet.lifecycle import begin_static
from fleetpipe.job import current_job
from fleetpipe.static import StaticOptimizer


def distributed_model(model: Any) -> Any:
    """Wraps a ``PipelineLayer`` for training; any other model is passed on to Paddle.

    Collective over the ranks of the pipeline.

    Args:
        model: The model that every rank built from the same list of layers.

    Returns:
        A :class:`~fleetpipe.dygraph.PipelineParallel`.

    Raises:
        ConfigError: ``pp_degree`` is above 1 and the model is no ``PipelineLayer`` of fleetpipe's.
    """
    job = current_job()
    if isinstance(model, PipelineLayer):
        return PipelineParallel(model)
    if job is None:
        return paddle_fleet.distributed_model(model)
    if job.degrees.pp > 1:
        theirs = isinstance(model, paddle_fleet.meta_parallel.PipelineLayer)
        raise ConfigError(
            f"pp_degree={job.degrees.pp} needs a PipelineLayer",
            got=f"{type(model).__module__}.{type(model).__name__}",
            fix="from fleetpipe.fleet.meta_parallel import PipelineLayer"
            if theirs
            else "write the model as PipelineLayer(layers=[LayerDesc(..), ..])",
        )
    return model


def distributed_optimizer(optimizer: Any, strategy: Any = None) -> Any:
    """Wraps an optimizer for ``train_batch``, or in static graph for ``minimize``.

    Without a pipeline (a job in dynamic graph, ``strategy.pipeline`` in static graph) it is passed
    on to Paddle.

    Args:
        optimizer: Any Paddle optimizer, in dynamic graph built on ``model.parameters()``.
        strategy: Takes the place of the strategy given to ``fleet.init``.

    Returns:
        A :class:`~fleetpipe.dygraph.PipelineOptimizer`, in static graph a
        :class:`~fleetpipe.static.StaticOptimizer`.

    Raises:
        ConfigError: The optimizer cannot be right on several ranks.
    """
    if not paddle.in_dynamic_mode():
        chosen = _paddle.user_strategy() if strategy is None else strategy
        if getattr(chosen, "pipeline", False):
            begin = functools.partial(begin_static, chosen)
            return StaticOptimizer(optimizer, chosen, begin, arrival.world_size())
        return paddle_fleet.distributed_optimizer(optimizer, strategy)
    job = current_job()
    if job is None:
        return paddle_fleet.distributed_optimizer(optimizer, strategy)
    if strategy is not None:
        _paddle.install_topology(job.hcg, copy.deepcopy(strategy))
    if job.degrees.pp > 1 and not job.local:
        refuse_partial_norm(optimizer)
    return PipelineOptimizer(optimizer)
