"""Bugs in a user's script, and in a program, are named; a selection of those that there are."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fleetpipe.paddle_api import VERSION
from tests.contrib.locator import seeded
from tests.launching import command

pytestmark = pytest.mark.processes

SCRIPT = """
import os, sys
import numpy as np, paddle
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import PipelineLayer

dp = 2 if os.environ["DEGREES"] else 1
strategy = fleet.DistributedStrategy()
strategy.hybrid_configs = {"dp_degree": dp}
strategy.pipeline_configs = {"accumulate_steps": 4 // dp, "micro_batch_size": 2}
fleet.init(is_collective=True, strategy=strategy)
paddle.seed(7)
layers = [nn.Linear(4, 8), nn.GELU() if "wrong" in sys.argv else nn.ReLU(), nn.Linear(8, 4)]
layers.insert(2, nn.Dropout(0.1))
model = fleet.distributed_model(PipelineLayer(layers, num_stages=1, loss_fn=nn.MSELoss()))
adam = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
optimizer = fleet.distributed_optimizer(adam)
replica = fleet.get_hybrid_communicate_group().get_data_parallel_rank()
for step in range(3):
    rows = np.random.default_rng(step).normal(size=(2, dp, 8 // dp, 4)).astype("float32")
    print(float(model.train_batch([*map(paddle.to_tensor, rows[:, replica])], optimizer)))
"""


def test_a_right_script_gives_no_alarm_and_its_twin_serves_a_wrong_one(tmp_path: Path) -> None:
    script, kept = tmp_path / "train.py", tmp_path / "kept"
    script.write_text(SCRIPT)
    words = sys.executable, "-m", "fleetpipe", "locate", "--nproc", "2", "--json", "--steps", "2"
    first = *words, "--twin", "DEGREES=", "--record", kept, script
    right = command(*first, cwd=tmp_path, DEGREES="dp2")
    assert (right.returncode, right.stdout) == (0, "null\n"), right.stderr
    wrong = command(*words, "--against", kept, script, "wrong", cwd=tmp_path, DEGREES="dp2")
    assert wrong.returncode == 1, wrong.stderr
    place = json.loads(wrong.stdout)
    assert [place[key] for key in ("layer", "phase", "ranks")] == ["1", "forward", [0, 1]]


def test_bugs_of_several_axes_are_named(tmp_path: Path) -> None:
    names = ["no-tied-reduction", "column-backward-not-reduced", "statistics-frozen"]
    names += ["positions-from-zero", "nothing-of-parts"]
    if not VERSION.startswith("2."):  # which has no ep_degree
        names.append("expert-twice")
    assert seeded.wrong(names, tmp_path) == []
