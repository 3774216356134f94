"""Changes ``paddle.Model``, optimizers and ``clip_grad_norm_`` for jobs with a pipeline.

``paddle.Model`` refuses a pipeline, and warns that each rank runs the whole of any other model. An
optimizer may have no parameters, on a rank whose stages have nothing to train.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

from fleetpipe.aliases import Layer, Tensor
from fleetpipe.dygraph import PipelineLayer, PipelineParallel
from fleetpipe.errors import UsageError
from fleetpipe.job.job import current_job, pipeline_group
from fleetpipe.paddle_api import paddle
from fleetpipe.paddle_api.optimizer import allow_no_parameters, check_before_clip_grad_norm


def install() -> None:
    """Adapts Paddle's optimizers, ``clip_grad_norm_`` and ``paddle.Model`` to pipelines."""
    allow_no_parameters(lambda: pipeline_group().ranks > 1)
    check_before_clip_grad_norm(_refuse_norm_of_a_stage)
    constructor: Any = paddle.Model.__init__

    @functools.wraps(constructor)
    def construct(self: Any, network: Layer, *more: Any, **named: Any) -> None:
        _refuse_pipelines(network)
        _warn_of_copies()
        constructor(self, network, *more, **named)

    setattr(paddle.Model, "__init__", construct)  # noqa: B010  # mypy: a method is not assignable


def _refuse_norm_of_a_stage(parameters: Sequence[Tensor]) -> None:
    """Refuses ``clip_grad_norm_`` if it would use only the gradients of this rank's stages."""
    job = current_job()
    if job is None or job.group().ranks * job.model_parallel().ranks == 1:
        return
    if job.trains(parameters):
        raise UsageError(
            "clip_grad_norm_ takes the norm of the gradients of this rank's stages alone",
            expected="the norm of all gradients of the model",
            fix="give the optimizer grad_clip=paddle.nn.ClipGradByGlobalNorm(max_norm), which "
            "clips by that of all ranks; optimizer.gradient_norm is it",
        )


def _refuse_pipelines(network: Layer) -> None:
    """Refuses a model of several stages, wrapped or not."""
    wrapped = isinstance(network, PipelineParallel)
    if wrapped or (isinstance(network, PipelineLayer) and network.placement.stages > 1):
        raise UsageError(
            "paddle.Model does not run a pipeline",
            expected="an nn.Layer that a process runs as a whole",
            got=type(network).__name__,
            cause="fit, evaluate and predict call the network itself, which on several ranks is "
            "one stage of the model",
            fix="fleetpipe.Model(network) has these methods on all ranks; or write a loop of your "
            "own with train_batch and eval_batch of fleet.distributed_model(network)",
        )


def _warn_of_copies() -> None:
    """Warns that ``paddle.Model`` does not cut its network, in a job with several stages."""
    job = current_job()
    if job is not None and job.degrees.pp > 1 and not job.local:
        warnings.warn(
            f"paddle.Model runs the whole network on each rank: pp_degree={job.degrees.pp} cuts "
            "the network of a fleetpipe.Model, which has the same methods",
            stacklevel=3,
        )
