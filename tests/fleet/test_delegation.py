"""Below fleetpipe.fleet stands all of paddle.distributed.fleet, as the very same objects."""

from __future__ import annotations

import importlib
import pickle
import pkgutil
import sys
from pathlib import Path

import paddle
import pytest
from paddle.distributed import fleet as theirs

from fleetpipe import fleet
from fleetpipe.fleet import overlay
from fleetpipe.fleet.overlay import OVERLAYS
from tests.launching import command

pytestmark = pytest.mark.every_row

OWN = {
    "DistributedStrategy",
    "distributed_model",
    "distributed_optimizer",
    "distributed_scaler",
    "get_hybrid_communicate_group",
    "init",
    "init_worker",
    "layers",
    "meta_parallel",
    "save_inference_model",
    "save_persistables",
    "stop_worker",
    "utils",
}


def test_every_name_is_paddles_unless_fleetpipe_defines_it() -> None:
    names = [name for name in vars(theirs) if not name.startswith("__")]
    different = {name for name in names if getattr(fleet, name) is not getattr(theirs, name)}
    assert different == OWN


def test_importing_everything_loads_no_second_copy(tmp_path: Path) -> None:
    script = """
import importlib, pkgutil, sys, warnings
warnings.simplefilter("ignore")
import paddle.distributed.fleet as theirs
import fleetpipe.fleet
before = {}
for info in pkgutil.walk_packages(theirs.__path__, "paddle.distributed.fleet."):
    if any(part in info.name for part in ("elastic", "launch", "__main__", "tree_", "cloud_utils")):
        continue
    try:
        before[info.name] = importlib.import_module(info.name)
    except Exception:
        continue
own = ("meta_parallel", "meta_parallel.pipeline_parallel", "meta_parallel.parallel_layers",
       "meta_parallel.parallel_layers.pp_layers", "meta_parallel.parallel_layers.mp_layers",
       "meta_parallel.tensor_parallel", "layers", "layers.mpu", "layers.mpu.mp_layers",
       "layers.mpu.mp_ops", "meta_parallel.dualpipev", "utils", "utils.sequence_parallel_utils")
for name, module in before.items():
    tail = name[len("paddle.distributed.fleet."):]
    ours = importlib.import_module("fleetpipe.fleet." + tail)
    assert (ours is module) == (tail not in own), name
    assert module.__spec__.name == name
assert fleetpipe.fleet.fleet is theirs.fleet
print(len(before))
"""
    done = command(sys.executable, "-c", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) > 50


def test_the_singleton_keeps_its_name_after_an_import_of_its_module() -> None:
    importlib.import_module("fleetpipe.fleet.fleet")
    assert fleet.fleet is theirs.fleet
    assert isinstance(fleet.fleet, theirs.Fleet)


def test_star_import_brings_both_sides() -> None:
    namespace: dict[str, object] = {}
    exec("from fleetpipe.fleet import *", namespace)
    assert namespace["init"] is fleet.init
    assert namespace["CommunicateTopology"] is theirs.CommunicateTopology


@pytest.mark.parametrize("path", ["meta_parallel", *OVERLAYS])
def test_a_star_import_brings_every_name_that_differs(path: str) -> None:
    module = importlib.import_module(f"fleetpipe.fleet.{path}")
    below = [name for name in OVERLAYS if name.rpartition(".")[0] == path]
    namespace: dict[str, object] = {}
    exec(f"from fleetpipe.fleet.{path} import *", namespace)
    for name in [*OVERLAYS.get(path, ()), *(name.rpartition(".")[2] for name in below)]:
        assert namespace[name] is getattr(module, name)
        assert name in dir(module)
    for name in below:
        assert namespace[name.rpartition(".")[2]] is sys.modules[f"fleetpipe.fleet.{name}"]


@pytest.mark.parametrize("path", OVERLAYS)
def test_a_module_of_the_table_says_that_it_is_fleetpipes(path: str) -> None:
    module = importlib.import_module(f"fleetpipe.fleet.{path}")
    assert module.__name__ == f"fleetpipe.fleet.{path}"
    assert module.__file__ == overlay.__file__
    assert path in str(module.__doc__)
    assert importlib.reload(module) is module
    with pytest.raises(AttributeError, match="nonsense"):
        _ = module.nonsense


def test_a_pickled_object_of_paddles_comes_back() -> None:
    role = fleet.UserDefinedRoleMaker
    assert pickle.loads(pickle.dumps(role)) is theirs.UserDefinedRoleMaker


def test_an_unknown_module_or_name_is_an_ordinary_error() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"fleetpipe\.fleet\.nonsense"):
        importlib.import_module("fleetpipe.fleet.nonsense")
    with pytest.raises(AttributeError):
        _ = fleet.nonsense


@pytest.mark.parametrize(
    "path",
    ["meta_parallel", "meta_parallel.parallel_layers", "meta_parallel.parallel_layers.pp_layers"],
)
def test_the_pipeline_layer_is_fleetpipes_at_every_path(path: str) -> None:
    module = importlib.import_module(f"fleetpipe.fleet.{path}")
    real = importlib.import_module(f"paddle.distributed.fleet.{path}")
    assert module.PipelineLayer is fleet.meta_parallel.PipelineLayer
    assert module.PipelineLayer is not real.PipelineLayer
    assert module.LayerDesc is real.LayerDesc
    assert module.SharedLayerDesc is real.SharedLayerDesc
    assert issubclass(module.PipelineLayer, paddle.nn.Layer)


def test_paddles_own_modules_are_untouched() -> None:
    assert theirs.init.__module__.startswith("paddle.")
    assert theirs.meta_parallel.PipelineLayer.__module__.startswith("paddle.")
    assert [m.name for m in pkgutil.iter_modules(theirs.__path__) if m.name == "fleet"] == ["fleet"]
