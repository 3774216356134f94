"""What the import of fleet loads, and what a plain pipeline does not load."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.launching import command
from tests.test_house import modules, ring

PROGRAM = """
import sys
import paddle
from paddle import nn
from fleetpipe import fleet
from fleetpipe.fleet.meta_parallel import LayerDesc, PipelineLayer

strategy = fleet.DistributedStrategy()
strategy.hybrid_configs = {"pp_degree": 2}
options = {"accumulate_steps": 2, "micro_batch_size": 2, "schedule_mode": SCHEDULE}
strategy.pipeline_configs = options
fleet.init(is_collective=True, strategy=strategy)
model = PipelineLayer(LAYERS, num_stages=2, loss_fn=nn.MSELoss())
optimizer = fleet.distributed_optimizer(paddle.optimizer.SGD(0.1, parameters=model.parameters()))
model = fleet.distributed_model(model)
model.train_batch([paddle.ones([4, 8, 8]), paddle.ones([4, 8, 8])], optimizer)
features = ("contrib.slices", "contrib.experts", "contrib.vocabulary", "contrib.sequences")
print("loaded", *(name for name in features if f"fleetpipe.{name}" in sys.modules))
"""
IMPORT = """
import sys
from fleetpipe import fleet

files = {getattr(module, "__file__", None) for module in sys.modules.values()}
print(*sorted(filter(None, files)), sep="\\n")
"""
#: The faces that every import of the package loads.
FACES = {"fleetpipe.__init__", "fleetpipe.contrib.__init__"}
PLAIN = "[LayerDesc(nn.Linear, 8, 8) for _ in range(4)]"
EXPERTS = (
    "[*(LayerDesc(nn.Linear, 8, 8) for _ in range(3)),"
    " type('Mixed', (nn.Sequential,), {})(('experts', nn.Linear(8, 8)))]"
)


@pytest.mark.parametrize(
    ("schedule", "layers", "loaded"),
    [
        ("1F1B", PLAIN, ""),
        ("Seq1F1B", PLAIN, " contrib.slices"),
        ("1F1B", EXPERTS, " contrib.experts"),
    ],
)
def test_features_are_loaded_by_those_who_have_them(
    schedule: str, layers: str, loaded: str
) -> None:
    program = PROGRAM.replace("SCHEDULE", repr(schedule)).replace("LAYERS", layers)
    done = command(sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"loaded{loaded}"


def test_the_import_of_fleet_loads_the_core_alone() -> None:
    done = command(sys.executable, "-c", IMPORT)
    files = {Path(line).resolve() for line in done.stdout.splitlines()}
    loaded = {name for name, path in modules().items() if path.resolve() in files}
    assert {name for name in loaded if ring(name)} == FACES
    assert 100 < len(loaded) <= 140
