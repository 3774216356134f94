"""Measured costs: one figure for each stage and kind, and a model that is as before."""

from __future__ import annotations

from pathlib import Path

import paddle
from paddle import nn

from fleetpipe.dygraph.observe.profile import one_micro_batch
from fleetpipe.fleet.meta_parallel import LayerDesc
from fleetpipe.planning import Profile
from fleetpipe.schedules import Costs, Placement
from tests.pipelines import batch, bits, job, pipeline, sgd


def test_one_micro_batch_is_on_its_way_at_a_time() -> None:
    for placement in (Placement("loop", 3, 1), Placement("vee", 2, 2)):
        schedule = one_micro_batch(placement)
        schedule.verify()
        # W of a stage runs beside I of the stage before, where that is another rank's.
        assert schedule.simulate().makespan <= 3 * placement.stages
        assert sum(map(len, schedule.actions)) == 3 * placement.stages


def test_the_costs_of_a_model_are_measured_and_can_be_searched_with(tmp_path: Path) -> None:
    sizes = [(6, 512), (512, 512), (512, 4)]
    first, *others = [LayerDesc(nn.Linear, *size) for size in sizes]
    layers = [first, LayerDesc(nn.BatchNorm1D, 512), LayerDesc(nn.Dropout, 0.5), *others]
    path = tmp_path / "costs.json"
    with job(2):
        model = pipeline(layers, seg_method=[0, 3])
        before = bits(model.layers.state_dict())
        paddle.seed(3)
        expected = paddle.rand([2]).numpy()
        paddle.seed(3)
        measured = model.profile(batch(), path)
        assert bits(model.layers.state_dict()) == before
        grads = [parameter.grad for parameter in model.parameters()]
        assert not any(float(grad.abs().sum()) for grad in grads if grad is not None)
        assert (paddle.rand([2]).numpy() == expected).all()
    for name in ("forward", "input_grad", "weight_grad", "bytes"):
        assert len(measured[name]) == 2
        assert min(measured[name]) > 0
    assert Profile.read(path) == measured
    Costs.from_json(path.read_text()).check_stages(2)
    with job(2, schedule="auto", costs=path):
        model = pipeline(layers)
        assert model.schedule.name == "auto"
        assert float(model.train_batch(batch(), sgd(model))) > 0
