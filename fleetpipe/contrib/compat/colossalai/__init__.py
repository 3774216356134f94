"""ColossalAI's legacy pipeline, by its names: a program changes its imports and its layers.

Modules stand where ColossalAI has them: ``core``, ``logging``, ``nn``, ``pipeline``, ``trainer``
and ``utils``. ``context`` begins the job that a ``configuration`` describes, and tells the program
its place in it (``gpc``). ``pipeline.pipelinable`` makes a model without memory;
``sequence`` puts its layers in order and says how each is called, and ``model`` is the
``PipelineLayer`` that comes of it. ``engine`` runs batches, and ``trainer`` epochs of them.
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
    """Says what makes ColossalAI's schedules here.

    Raises:
        UsageError: One was asked for; an ``AttributeError`` would not reach who imports it.
        AttributeError: There is no such name.
    """
    if name in ("PipelineSchedule", "InterleavedPipelineSchedule"):
        raise UsageError(
            f"no program makes a {name} here",
            fix="set NUM_MICRO_BATCHES in the configuration, and NUM_CHUNKS for an interleaved "
            "one: initialize makes the schedule; SCHEDULE='ZBH1' names another",
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
