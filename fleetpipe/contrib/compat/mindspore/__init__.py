"""Runs programs of MindSpore's pipeline of r1.5 and r1.6, whose sublayers have stages.

``context`` keeps the options and begins the job, ``nn`` has the cells around a network and the
stages of its sublayers, and ``train`` the ``Model`` that captures, cuts and trains it.
``communication`` and ``train.callback`` have names at MindSpore's paths.
"""

from __future__ import annotations

from fleetpipe.callbacks import LossMonitor as LossMonitor
from fleetpipe.contrib.compat.mindspore import communication, context, nn, train
from fleetpipe.contrib.compat.mindspore.context import (
    Options,
    ParallelMode,
    get_auto_parallel_context,
    get_group_size,
    get_rank,
    init,
    reset_auto_parallel_context,
    set_auto_parallel_context,
    set_context,
)
from fleetpipe.contrib.compat.mindspore.nn import (
    Cell,
    PipelineCell,
    WithLossCell,
    add_pipeline_stage,
    infer_param_pipeline_stage,
)
from fleetpipe.contrib.compat.mindspore.train import Model

__all__ = [
    "Cell",
    "Model",
    "Options",
    "ParallelMode",
    "PipelineCell",
    "WithLossCell",
    "add_pipeline_stage",
    "communication",
    "context",
    "get_auto_parallel_context",
    "get_group_size",
    "get_rank",
    "infer_param_pipeline_stage",
    "init",
    "nn",
    "reset_auto_parallel_context",
    "set_auto_parallel_context",
    "set_context",
    "train",
]
