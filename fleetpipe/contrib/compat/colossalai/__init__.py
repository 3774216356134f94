"""Runs programs of ColossalAI's legacy pipeline, which change their imports and layers only.

Modules have ColossalAI's paths: ``core``, ``logging``, ``nn``, ``pipeline``, ``trainer`` and
``utils``. Start with ``context``: it reads the configuration, begins the job, tells the program its
rank (``gpc``), and runs batches (``Engine``). ``pipeline.pipelinable`` makes a model without
memory, which ``pipeline`` turns into a ``PipelineLayer``; ``trainer`` runs epochs.
"""

from __future__ import annotations

from fleetpipe.contrib.compat.colossalai import nn
from fleetpipe.contrib.compat.colossalai.context import (
    Engine,
    GlobalContext,
    ParallelMode,
    get_default_parser,
    gpc,
    initialize,
    launch_from_torch,
)
from fleetpipe.contrib.compat.colossalai.logging import disable_existing_loggers, get_dist_logger
from fleetpipe.contrib.compat.colossalai.pipeline import PipelinableModel
from fleetpipe.contrib.compat.colossalai.pipeline.pipelinable import PipelinableContext
from fleetpipe.contrib.compat.colossalai.trainer import Trainer, hooks
from fleetpipe.contrib.compat.colossalai.utils import MultiTimer, build_cifar, get_dataloader

__all__ = [
    "Engine",
    "GlobalContext",
    "MultiTimer",
    "ParallelMode",
    "PipelinableContext",
    "PipelinableModel",
    "Trainer",
    "build_cifar",
    "disable_existing_loggers",
    "get_dataloader",
    "get_default_parser",
    "get_dist_logger",
    "gpc",
    "hooks",
    "initialize",
    "launch_from_torch",
    "nn",
]
