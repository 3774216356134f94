"""A plain pipeline loads nothing of the features that cross borders; a model with one loads it."""

from __future__ import annotations

import sys

import pytest

from tests.launching import command

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
features = ("contrib.slices", "contrib.experts", "dygraph.vocabulary", "dygraph.sequences")
print("loaded", *(name for name in features if f"fleetpipe.{name}" in sys.modules))
"""
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
