"""The names of Fleet's pipeline in the installed Paddle that tests/repository's tables need.

    python -m tests.paddle_names

prints those that its tables lack, a line each, and exits 1 where there are any: with a new Paddle,
what is to be looked at.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import paddle
from paddle.distributed import fleet
from paddle.distributed.auto_parallel import constants
from paddle.distributed.fleet.base import topology
from paddle.distributed.fleet.meta_parallel import pipeline_parallel as wrappers
from paddle.distributed.fleet.meta_parallel.parallel_layers import pp_layers
from paddle.distributed.fleet.utils import hybrid_parallel_util, sequence_parallel_utils

from tests.repository.tables import rows

VERSION = paddle.__version__
FLEET = Path(fleet.__file__).parent
#: The files whose environment variables and flags a user of a pipeline may have set.
READERS = (
    "meta_parallel/**/*.py",
    "layers/mpu/*.py",
    "meta_optimizers/dygraph_optimizer/*.py",
    "base/topology.py",
    "utils/*.py",
)


def names_of(module: Any, origin: str) -> set[str]:
    """Returns the public names of a module whose objects, or their types, stem from ``origin``."""
    found = set()
    for name in dir(module):
        value = getattr(module, name)
        stems = getattr(value, "__module__", None) or getattr(value, "__name__", "")
        if not name.startswith("_") and str(stems).startswith(origin):
            found.add(name)
    return found


def _members(*classes: Any) -> set[str]:
    return {name for cls in classes for name in vars(cls) if not name.startswith("_")}


def _arguments(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self", "args", "kwargs"}


def _fields(group: str) -> set[str]:
    message = fleet.DistributedStrategy().hybrid_configs[group]
    return {field.name for field in message.DESCRIPTOR.fields}


def variables() -> set[str]:
    """Returns the flags and environment variables that Fleet's pipeline reads."""
    return {
        node.value
        for pattern in READERS
        for file in FLEET.glob(pattern)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"(FLAGS|PADDLE)_\w+", node.value)
    }


def names() -> dict[str, set[str]]:
    """Returns Paddle's names by the table that lists them, as "kind subject"."""
    ours, paddles = "fleetpipe.fleet", "paddle.distributed.fleet"
    meta = f"{ours}.meta_parallel"
    wrapper = f"{meta}.PipelineParallel"
    utils = {
        f"{module.__name__}".rpartition(".")[2]: module
        for module in (hybrid_parallel_util, sequence_parallel_utils)
    }
    pipeline = wrappers.PipelineParallel
    found = {
        f"name in {ours}": names_of(fleet, "paddle."),
        f"name in {meta}": names_of(fleet.meta_parallel, "paddle."),
        f"name in {meta}.pipeline_parallel": names_of(wrappers, f"{paddles}.meta_parallel."),
        f"name in {meta}.parallel_layers.pp_layers": names_of(
            pp_layers, f"{paddles}.meta_parallel."
        ),
        f"name in {ours}.base.topology": names_of(topology, topology.__name__),
        f"name in {ours}.utils": {
            f"{path}.{name}"
            for path, module in utils.items()
            for name in names_of(module, module.__name__)
        },
        f"argument of {meta}.PipelineLayer": _arguments(pp_layers.PipelineLayer),
        f"argument of {meta}.SharedLayerDesc": _arguments(pp_layers.SharedLayerDesc),
        f"argument of {wrapper}": _arguments(pipeline),
        **{
            f"argument of {wrapper}.{name}": _arguments(getattr(pipeline, name))
            for name in ("train_batch", "eval_batch", "forward_backward_pipeline")
        },
        **{
            f"argument of {ours}.{name}": _arguments(getattr(fleet, name))
            for name in ("init", "distributed_model")
        },
        f"member of {meta}.PipelineLayer": _members(pp_layers.PipelineLayer),
        f"member of {wrapper}": _members(pipeline, wrappers.PipelineParallelWithInterleave),
        f"member of {ours}.CommunicateTopology": _members(fleet.CommunicateTopology),
        f"member of {ours}.HybridCommunicateGroup": _members(fleet.HybridCommunicateGroup),
        "option of pipeline_configs": set(fleet.DistributedStrategy().pipeline_configs),
        "option of hybrid_configs": set(fleet.DistributedStrategy().hybrid_configs),
        **{
            f"option of {group}": _fields(group)
            for group in ("pp_configs", "mp_configs", "sharding_configs")
        },
        "environment variable": variables(),
    }
    found.update(_pipelining())
    shards = "paddle.distributed.sharding"
    found[f"name in {shards}"] = set(importlib.import_module(shards).__all__)
    fields = constants.get_category_default_config(constants.PIPELINE)
    found["field of paddle.distributed.Strategy.pipeline"] = set(fields)
    experts = getattr(topology, "EPHybridCommunicateGroup", None)
    if experts is not None:
        members = {name for name in _members(experts) if name.startswith("get_")}
        found[f"member of {ours}.base.topology.EPHybridCommunicateGroup"] = members
    return found


def _pipelining() -> dict[str, set[str]]:
    """Returns the names of ``auto_parallel.pipelining`` by table; none on 2.6.2, which lacks it."""
    package = "paddle.distributed.auto_parallel.pipelining"
    if VERSION.startswith("2."):
        return {}
    modules = [
        importlib.import_module(f"{package}.{name}")
        for name in ("schedules", "stage", "microbatch", "utils")
    ]
    return {
        f"name in {module.__name__}": {
            name for name in names_of(module, module.__name__) if callable(getattr(module, name))
        }
        for module in modules
    }


def missing() -> list[str]:
    """Returns what the page lacks of the installed Paddle, "kind subject name" each."""
    listed = {str(row) for row in rows() if row.is_there_on(VERSION)}
    every = {f"{table} {name}" for table, found in names().items() for name in found}
    return sorted(every - listed)


if __name__ == "__main__":
    lacking = missing()
    print(f"Paddle {VERSION}: {len(lacking)} names that tests/repository's tables lack")
    print("\n".join(lacking))
    sys.exit(bool(lacking))
