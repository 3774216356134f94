"""ColossalAI's legacy pipeline, by its names: a program changes its imports and its layers.

``launching`` begins the job that a ``configuration`` describes, and ``context`` (``gpc``) tells the
program its place in it. ``pipelinable`` makes a model without memory; ``sequence`` puts its layers
in order, ``calls`` says how each is called, ``cuts`` where a stage ends; ``model`` is the
``PipelineLayer`` that comes of it, with ``lazy_layers`` as its entries. ``engine`` runs batches.
"""

from __future__ import annotations

from fleetpipe.compat.colossalai import lr_scheduler
from fleetpipe.compat.colossalai.context import GlobalContext, ParallelMode, gpc
from fleetpipe.compat.colossalai.data import get_dataloader
from fleetpipe.compat.colossalai.engine import Engine, initialize
from fleetpipe.compat.colossalai.launching import get_default_parser, launch_from_torch
from fleetpipe.compat.colossalai.logger import disable_existing_loggers, get_dist_logger
from fleetpipe.compat.colossalai.model import PipelinableModel
from fleetpipe.compat.colossalai.pipelinable import PipelinableContext

__all__ = [
    "Engine",
    "GlobalContext",
    "ParallelMode",
    "PipelinableContext",
    "PipelinableModel",
    "disable_existing_loggers",
    "get_dataloader",
    "get_default_parser",
    "get_dist_logger",
    "gpc",
    "initialize",
    "launch_from_torch",
    "lr_scheduler",
]
