"""Makes the modules below ``fleetpipe.fleet``: a table of changed ones; all others are Paddle's.

The names that ``OVERLAYS`` lists for a module are fleetpipe's, all others in it are Paddle's. A
module that is neither in the table nor a file of this package is Paddle's own, not a second copy.

Paddle's mixtures of experts use fleetpipe's operations, which are loaded at their first call.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
from collections.abc import Callable, Mapping
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

from fleetpipe.extras import Finder, spec_of
from fleetpipe.paddle_api.device import device_kind
from fleetpipe.paddle_api.eager_operations import provide_operations
from fleetpipe.paddle_api.layer import replace_in_moe
from fleetpipe.paddle_api.meta_parallel import GPU_OPERATIONS

OURS = "fleetpipe.fleet"
PADDLES = "paddle.distributed.fleet"
#: The folder of this package; its modules replace Paddle's.
_FOLDER = Path(__file__).parent

# Beginnings of the paths of objects, as ``pkgutil.resolve_name`` takes them.
_DYGRAPH = "fleetpipe.dygraph:"
_TENSOR_PARALLEL = "fleetpipe.dygraph.tensor_parallel:"
_DESCRIPTIONS = "fleetpipe.paddle_api.meta_parallel:"

_resolve = functools.cache(pkgutil.resolve_name)

#: Paddle's operations for experts that have no CPU kernel.
_OPERATIONS = (
    *("number_count", "assign_pos", "limit_by_capacity", "prune_gate_by_capacity"),
    *("random_routing", "global_scatter", "global_gather"),
)


def _names_in(module: str, *names: str) -> dict[str, str]:
    """Returns for each of ``names`` its path in ``module``: ``"package.module:name"``."""
    return {name: module + name for name in names}


_TENSOR_PARALLEL_LAYERS = _names_in(
    _TENSOR_PARALLEL,
    "ColumnParallelLinear",
    "ParallelCrossEntropy",
    "RowParallelLinear",
    "VocabParallelEmbedding",
)

#: By path below ``fleetpipe.fleet``: a module that replaces Paddle's, and the names that differ in
#: it, each with the path of its object.
OVERLAYS: Mapping[str, Mapping[str, str]] = {
    "layers": {},
    "layers.mpu": _TENSOR_PARALLEL_LAYERS,
    "layers.mpu.mp_layers": _TENSOR_PARALLEL_LAYERS,
    "layers.mpu.mp_ops": (
        {}
        if device_kind() != "cpu"
        else _names_in("fleetpipe.dygraph.tensor_parallel.replacements:", *GPU_OPERATIONS)
    ),
    "meta_parallel.dualpipev": _names_in(_DYGRAPH, "DualPipeVParallel"),
    "meta_parallel.parallel_layers": {
        **_TENSOR_PARALLEL_LAYERS,
        **_names_in(_DESCRIPTIONS, "LocalSharedLayerDesc"),
        **_names_in(_DYGRAPH, "PipelineLayer"),
    },
    "meta_parallel.parallel_layers.mp_layers": _TENSOR_PARALLEL_LAYERS,
    "meta_parallel.parallel_layers.pp_layers": {
        **_names_in(_DESCRIPTIONS, "LocalSharedLayerDesc"),
        **_names_in(_DYGRAPH, "PipelineLayer"),
        **_names_in("fleetpipe.dygraph.layers.run_stage:", "PipelineLayerChunk"),
    },
    "meta_parallel.pipeline_parallel": {
        **_names_in(
            _DYGRAPH,
            *("DualPipeVParallel", "FakeMicroDataset", "NoPipelineParallel", "PipelineLayer"),
            *("PipelineParallel", "PipelineParallelWithInterleave"),
            *("PipelineParallelWithInterleaveFthenB", "VPPFhenBInBalancedMemory"),
        ),
        **_names_in(
            _DESCRIPTIONS,
            *("PipelineDatasetPreprocessor", "PipelineParallelMicroStepCallback"),
            *("PipelineParallelMicroStepLocations", "pipeline_parallel_callbacks_"),
            "register_global_pipeline_parallel_hook",
        ),
    },
    "meta_parallel.tensor_parallel": _names_in(_TENSOR_PARALLEL, "TensorParallel"),
    "utils": {},
    "utils.sequence_parallel_utils": _names_in(
        f"{_TENSOR_PARALLEL}sequence_parallel_utils.",
        *("AllGatherOp", "ColumnSequenceParallelLinear", "GatherOp", "ReduceScatterOp"),
        *("RowSequenceParallelLinear", "ScatterOp", "all_gather", "reduce_scatter"),
        *("register_sequence_parallel_allreduce_hooks", "scatter"),
    ),
}


def module_over(
    names: Mapping[str, object], paddles: ModuleType, ours: Mapping[str, str] = MappingProxyType({})
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns ``__getattr__`` and ``__dir__`` of a module that adds names to one of Paddle's.

    Args:
        names: The module's ``globals()``.
        paddles: Paddle's module, which has every other name.
        ours: Further names that are fleetpipe's, each with the path of its object, which is loaded
            when the name is used.
    """

    def get(name: str) -> Any:
        return pkgutil.resolve_name(ours[name]) if name in ours else getattr(paddles, name)

    def list_names() -> list[str]:
        return sorted({*names, *ours, *dir(paddles)})

    return get, list_names


class _Overlay(Loader):
    """Loads a module below ``fleetpipe.fleet``: Paddle's names, and fleetpipe's in their place."""

    def __init__(self, path: str) -> None:
        self._path = path

    def create_module(self, spec: ModuleSpec) -> None:
        """Returns None, so that Python makes the module object."""

    def exec_module(self, module: ModuleType) -> None:
        """Fills a module with Paddle's names and fleetpipe's, both looked up at their first use."""
        names = vars(module)
        names["__doc__"] = f"``{PADDLES}.{self._path}`` with names of fleetpipe's."
        paddles = _paddles_module(self._path)
        changed = [*OVERLAYS[self._path], *_table_modules_in(self._path)]
        names["__all__"] = [*dict.fromkeys([*changed, *getattr(paddles, "__all__", ())])]
        names["__getattr__"], names["__dir__"] = module_over(names, paddles, OVERLAYS[self._path])


def _table_modules_in(path: str) -> list[str]:
    """Returns the names of the table's modules that are directly in the package ``path``."""
    parents_and_names = (overlay.rpartition(".") for overlay in OVERLAYS)
    return [name for parent, _, name in parents_and_names if parent == path]


def _paddles_module(path: str) -> ModuleType:
    """Returns Paddle's module, or an empty one if Paddle lacks it: 2.6.2 has no ``dualpipev``."""
    name = f"{PADDLES}.{path}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return ModuleType(name)


def _find_spec(fullname: str) -> ModuleSpec | None:
    """Returns the spec of a module below ``fleetpipe.fleet`` that has no file in this package.

    It is None for any other module. The finder stands before Python's path finder, which would load
    the submodules of Paddle's packages a second time.
    """
    if not fullname.startswith(OURS + "."):
        return None
    name = fullname[len(OURS) + 1 :]
    if name in OVERLAYS:
        spec = ModuleSpec(
            fullname, _Overlay(name), origin=__file__, is_package=bool(_table_modules_in(name))
        )
        spec.has_location = True  # otherwise `__file__` would be that of Paddle's module
        return spec
    return None if _is_file(name) else spec_of(fullname, f"{PADDLES}.{name}")


def _is_file(name: str) -> bool:
    """Returns whether a module below ``fleetpipe.fleet`` has a file in this package."""
    file = _FOLDER.joinpath(*name.split("."))
    return file.with_suffix(".py").exists() or (file / "__init__.py").exists()


def install() -> None:
    """Installs the finder, imports the table's modules, and shares those that Paddle has loaded.

    So a later import does not replace an attribute by the module of the same name: ``fleet.fleet``
    is Paddle's singleton, and ``paddle.distributed.fleet.fleet`` also a module.
    """
    Finder(_find_spec).install()
    for path in OVERLAYS:
        importlib.import_module(f"{OURS}.{path}")
    for name, module in list(sys.modules.items()):
        path = name[len(PADDLES) + 1 :]
        if name.startswith(PADDLES + ".") and not _is_file(path):
            sys.modules.setdefault(f"{OURS}.{path}", module)


def _load_at_call(name: str) -> Callable[..., Any]:
    """Returns a function that loads and calls ``name`` of ``contrib.experts.exchange``."""

    def call(*args: Any, **named: Any) -> Any:
        return _resolve(f"fleetpipe.contrib.experts.exchange:{name}")(*args, **named)

    return call


def replace_moe_functions() -> None:
    """Replaces functions that Paddle's ``MoELayer`` calls; more of them if there is no GPU.

    ``paddle.incubate.distributed.models.moe.MoELayer``, its gates, and layers of libraries call
    these functions. It is done at once, since a script may build such a layer before the pipeline.
    """
    replace_in_moe(
        _local_gather=_load_at_call("local_gather"),
        MoEScatter=SimpleNamespace(apply=_load_at_call("moe_scatter")),
        MoEGather=SimpleNamespace(apply=_load_at_call("moe_gather")),
    )
    if device_kind() == "cpu":
        replace_in_moe(
            _alltoall=_load_at_call("alltoall"),
            check_nccl_version_for_p2p=_load_at_call("no_check"),
        )
        provide_operations({name: _load_at_call(name) for name in _OPERATIONS})
