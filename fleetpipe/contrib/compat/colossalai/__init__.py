"""Runs programs of ColossalAI's legacy pipeline, which change their imports and layers only.

Modules have ColossalAI's paths: ``core``, ``logging``, ``nn``, ``pipeline``, ``trainer`` and
``utils``. ``context`` begins the job that a ``configuration`` describes, and tells the program its
place in it (``gpc``). ``pipeline.pipelinable`` makes a model without memory; ``sequence`` puts its
layers in order and records how each is called, and ``model`` turns them into a ``PipelineLayer``.
``engine`` runs batches, and ``trainer`` epochs of them.
"""

from __future__ import annotations

from typing import NoReturn

from fleetpipe.contrib.compat.colossalai import nn
from fleetpipe.contrib.compat.colossalai.context import (
    GlobalContext,
    ParallelMode,
    get_default_parser,
    gpc,
    launch_from_torch,
)
from fleetpipe.contrib.compat.colossalai.engine import Engine, initialize
from fleetpipe.contrib.compat.colossalai.logging import disable_existing_loggers, get_dist_logger
from fleetpipe.contrib.compat.colossalai.nn import lr_scheduler
from fleetpipe.contrib.compat.colossalai.pipeline.model import PipelinableModel
from fleetpipe.contrib.compat.colossalai.pipeline.pipelinable import PipelinableContext
from fleetpipe.contrib.compat.colossalai.trainer import Trainer, hooks
from fleetpipe.contrib.compat.colossalai.utils import MultiTimer, get_dataloader
from fleetpipe.contrib.compat.colossalai.utils.data import build_cifar
from fleetpipe.errors import UsageError

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
    "lr_scheduler",
    "nn",
]


def __getattr__(name: str) -> NoReturn:
    """Refuses ColossalAI's classes of schedules, and says what takes their place.

    Raises:
        UsageError: The name is one of these classes; an import hides an ``AttributeError``.
        AttributeError: There is no such name.
    """
    if name in ("PipelineSchedule", "InterleavedPipelineSchedule"):
        raise UsageError(
            f"no program makes a {name} here",
            fix="set NUM_MICRO_BATCHES in the configuration, and NUM_CHUNKS for an interleaved "
            "one: initialize makes the schedule; SCHEDULE='ZBH1' names another",
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
