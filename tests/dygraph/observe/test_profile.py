"""Measured costs: one figure for each stage and kind, and a model that is as before."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe import systems
from fleetpipe.dygraph import random_keys
from fleetpipe.dygraph.backward import product
from fleetpipe.dygraph.observe.layer_meter import LayerMeter
from fleetpipe.dygraph.observe.profile import TYPICAL, between_ranks
from fleetpipe.fleet.meta_parallel import LayerDesc
from fleetpipe.paddle_api.device import allocated_bytes
from fleetpipe.profiling import Profile
from fleetpipe.schedules import Costs, Placement
from tests.fixtures import Patch
from tests.pipelines import batch, bits, job, model_in_job, pipeline, sgd


def test_the_costs_of_a_model_are_measured_and_can_be_searched_with(tmp_path: Path) -> None:
    sizes = [(6, 512), (512, 512), (512, 4)]
    first, *others = [LayerDesc(nn.Linear, *size) for size in sizes]
    layers = [first, LayerDesc(nn.BatchNorm1D, 512), LayerDesc(nn.Dropout, 0.5), *others]
    path = tmp_path / "costs.json"
    with model_in_job(2, layers=layers, seg_method=[0, 3]) as model:
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
    with model_in_job(2, schedule="auto", costs=path, layers=layers) as model:
        assert model.schedule.name == "auto"
        assert float(model.train_batch(batch(), sgd(model))) > 0


def test_layers_are_measured_under_the_seeds_of_a_batch() -> None:
    seen = []

    def note(value: paddle.Tensor) -> paddle.Tensor:
        seen.append(random_keys.current())
        return value

    with job(2):
        model = pipeline([LayerDesc(nn.Linear, 6, 4), note, LayerDesc(nn.Linear, 4, 4)])
        model.profile(batch())
        # A step seeds the generators before each layer, which takes time.
        assert None not in seen
        assert random_keys.current() is None


@pytest.mark.parametrize(
    ("layer", "waiting"),
    [
        # Of each Linear the input and the gradient of the output.
        (nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), 4),
        # Its gradients come together.
        (nn.LayerNorm(8), 0),
    ],
)
@pytest.mark.parametrize("rows", [4096, 65536])
def test_what_is_kept_between_i_and_w_is_measured(
    layer: Any, waiting: int, rows: int, monkeypatch: Patch
) -> None:
    # A process that has tried many shapes of such a product tries no more, and keeps the graph.
    monkeypatch.setattr(product, "_tried", {})
    functions = {0: layer}
    meter = LayerMeter(1, lambda _, value: (functions, value), lambda _: {0: layer})
    run = meter.run_of(0)
    for _ in range(2):
        run(paddle.rand([rows, 8]), None)
    assert [one.waiting for one in meter.samples[0, 0]] == [waiting * rows * 8 * 4] * 2


def test_one_process_takes_what_transfers_usually_cost() -> None:
    with job(2):
        profile = pipeline([LayerDesc(nn.Linear, 6, 6), LayerDesc(nn.Linear, 6, 4)]).profile(
            batch()
        )
    assert profile.transfer == TYPICAL


@pytest.mark.skipif(systems.resident_bytes() == 0, reason="the system says no resident size")
def test_a_process_takes_more_than_its_tensors() -> None:
    with model_in_job(2, 2) as model:
        process = model.profile(batch(2)).process
    assert process is not None
    assert process.growth >= 1
    # Paddle's libraries alone.
    assert 50 * 2**20 < process.base < systems.resident_bytes(peak=True)
    assert process.taken(2**30) >= 2**30 + process.base


def test_each_value_that_crosses_between_ranks_is_sent_and_received_twice() -> None:
    found = {("S", 0, 0): 3e-3, ("R", 1, 0): 6e-3, ("F", 0, 0): 1.0}
    size = 10**5
    for placement, crossings in ((Placement("loop", 2, 2), 3), (Placement("vee", 2, 2), 2)):
        link, transfer = between_ranks(placement, found, [size] * 3, 5e-5)
        # A value and its gradient.
        assert transfer.sends(size) == pytest.approx(3e-3 / (2 * crossings))
        assert transfer.receives(size) == pytest.approx(6e-3 / (2 * crossings))
        assert link.seconds(size) == 5e-5


def test_nothing_stays_in_memory() -> None:
    with model_in_job(2, 2) as model:
        require_nothing_stays(model, batch(2))


def require_nothing_stays(model: Any, data: Any) -> None:
    model.profile(data)
    gc.collect()
    before = allocated_bytes()
    model.profile(data)
    gc.collect()
    # Less, where garbage of an earlier test goes meanwhile.
    assert allocated_bytes() <= before
