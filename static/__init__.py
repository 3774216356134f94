"""Pipelines in static graph: programs cut along ``device_guard``, on both of Paddle's IRs.

The way of a program: ``entry`` takes it at ``minimize``, ``ir`` describes it in the form of
``graph.py``, ``cut.py`` assigns stages, ``ir`` builds a program for each stage, ``run`` trains
them, ``saved_state.py`` saves their parameters. Start with ``entry/optimizer.py``. No module here
imports dynamic graph or Fleet.
"""

from __future__ import annotations

from fleetpipe import paddle_api as paddle_api
from fleetpipe.static.entry.optimizer import DataLoader, StaticOptimizer, refuse_stages
from fleetpipe.static.entry.patches import install, uninstall
from fleetpipe.static.graph import stage_guard
from fleetpipe.static.ir import name_of
from fleetpipe.static.pipeline_programs import pipeline_of
from fleetpipe.static.reference import SingleProgram
from fleetpipe.static.run.pipeline import StaticPipeline
from fleetpipe.static.saved_state import (
    full_state_dict,
    load,
    load_state_dict,
    save,
    save_inference_model,
    state_dict,
)

__all__ = [
    "DataLoader",
    "SingleProgram",
    "StaticOptimizer",
    "StaticPipeline",
    "full_state_dict",
    "install",
    "load",
    "load_state_dict",
    "name_of",
    "pipeline_of",
    "refuse_stages",
    "save",
    "save_inference_model",
    "stage_guard",
    "state_dict",
    "uninstall",
]
