"""What ``repr`` says of every public object: its class and something of it, on one short line."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import callbacks, fleet, io, partition, schedules, transport
from fleetpipe.mesh import groups
from fleetpipe.parity.parity_report import Report
from fleetpipe.representation import shows
from tests.pipelines import batch, mlp_and_sgd
from tests.test_docs import PUBLIC

pytestmark = pytest.mark.once

#: Paddle's users know these forms: a tree of layers, a table of options, names of another library.
PADDLES = (nn.Layer, fleet.DistributedStrategy)
OTHER_LIBRARIES = ("fleetpipe.compat.colossalai", "fleetpipe.compat.mindspore")
#: Made by Paddle's names alone, for the data that a step reads; the second on 2.6.2.
WITHIN = {"FakeMicroDataset", "PipelineDatasetPreprocessor"}

SCHEDULE = schedules.build("ZBV", ranks=32, micro_batches=64)
LAYERS = [partition.LayerInfo(f"layer {number}", number) for number in range(200)]


def said(value: object) -> str:
    text = repr(value)
    assert len(text) <= 200
    assert "\n" not in text
    assert " object at 0x" not in text
    return text


def test_every_public_class_has_one() -> None:
    for place in ("fleetpipe", *PUBLIC):
        module = importlib.import_module(place)
        for name in getattr(module, "__all__", dir(module)):
            found = getattr(module, name)
            own = inspect.isclass(found) and found.__module__.startswith("fleetpipe")
            if not own or place in OTHER_LIBRARIES or getattr(found, "_is_protocol", False):
                continue
            assert name in WITHIN or found.__repr__ is not object.__repr__, found


MADE: dict[str, Callable[[Path], Any]] = {
    "<CheckpointManager folder=": lambda folder: fleetpipe.CheckpointManager(folder, max_to_keep=2),
    "<Schedule ZBV: 32 ranks, 64 micro-batches": lambda _: SCHEDULE,
    "<Plan ZBV: 32 ranks": lambda _: SCHEDULE.lower(),
    "<Timeline of ZBV: span ": lambda _: SCHEDULE.simulate(),
    "<Costs forward=<64>, input_grad=1,": lambda _: schedules.Costs(forward=(1.5,) * 64),
    "Placement(name='vee', ranks=32": lambda _: SCHEDULE.placement,
    "<Partition boundaries=(0, 50, 100, ": lambda _: partition.segment(LAYERS, 4),
    "<StageRange stage=0, start=0, end=50>": lambda _: partition.segment(LAYERS, 4).stages[0],
    "<MemoryTransport rank=1, ranks=2>": lambda _: transport.MemoryHub(2).endpoint(1),
    "<SoleGroup rank=0, ranks=1>": lambda _: groups.SoleGroup(),
    "<LossMonitor every=5>": lambda _: callbacks.LossMonitor(5),
    "<MetricsLogger on_rank='first', every=1, folder=": callbacks.MetricsLogger,
    "<Report passed=True, bit_exact=True, steps=0": lambda _: Report({"fleetpipe": "0.1.0"}),
    "<DistributedBatchSampler batch_size=4, ": lambda _: io.DistributedBatchSampler(range(8), 4),
    "<DataLoader dataset=range(0, 8), ": lambda _: io.DataLoader(range(8), batch_size=4),
}


@pytest.mark.parametrize("text", MADE)
def test_it_is_short_and_says_something(text: str) -> None:
    assert said(MADE[text](Path("run"))).startswith(text)


def test_what_a_job_makes(tmp_path: Path) -> None:
    with mlp_and_sgd(2) as (model, optimizer):
        profile = model.profile(batch())
        plan = fleetpipe.plan(profile, ranks=2, micro_batches=4)
        manager = fleetpipe.CheckpointManager(tmp_path)
        run = fleetpipe.resume(model, optimizer, manager=manager)
        assert said(optimizer).startswith("<PipelineOptimizer wrapped=SGD, learning_rate=")
        assert said(profile).startswith(f"<Profile layers=<{len(profile.layers)}>, splits=True")
        assert all(said(layer).startswith("<LayerCost name=") for layer in profile.layers)
        assert said(plan).startswith("<PipelinePlan schedule=<Schedule ")
        assert said(run).startswith("<Run step=0, folder=")
        # A layer's is Paddle's tree; its first line says which stages are here.
        assert repr(model.layers).startswith("PipelineLayer(stages=(0, 1) of 2\n  (")
        plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        captured = fleetpipe.pipeline(plain, paddle.ones([1, 2]), split_spec=["1"], verify=False)
        assert repr(captured).startswith("CapturedPipeline(stages=(0, 1) of 2\n  (")
        said(fleetpipe.explain(plain, paddle.ones([1, 2])))


def test_a_long_value_is_cut_and_one_that_is_missing_left_out() -> None:
    @shows("text", "many", "missing", "array", within="inner.text")
    class Shown:
        def __init__(self) -> None:
            self.text, self.many, self.array = "x" * 500, ["y"] * 500, np.zeros([50, 50])
            self.inner = self

    text = said(Shown())
    assert text.startswith("<Shown text='xxx")
    assert "many=<500>, array=<50>" in text
    assert text.endswith("..>")
