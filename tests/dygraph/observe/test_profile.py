"""Measured costs: one figure for each stage and kind, and a model that is as before."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import paddle
import pytest
from paddle import nn

from fleetpipe.dygraph import random_keys
from fleetpipe.dygraph._paddle import allocated_bytes
from fleetpipe.dygraph.observe.profile import TYPICAL, between_ranks, clock_for, in_turn
from fleetpipe.fleet.meta_parallel import LayerDesc
from fleetpipe.planning import Profile
from fleetpipe.schedules import Costs, Placement, build
from tests.pipelines import batch, bits, job, pipeline, sgd


def test_forward_and_backward_are_measured_in_turn_on_any_placement() -> None:
    for placement in (Placement("loop", 3, 1), Placement("loop", 2, 3), Placement("vee", 2, 2)):
        for kinds in ("B", "IW"):
            schedule = in_turn(placement, 5, kinds)
            schedule.verify()
            assert sum(map(len, schedule.actions)) == 5 * placement.stages * (1 + len(kinds))
    plain = build("1F1B", ranks=3, micro_batches=5)
    assert in_turn(plain.placement, 5, "B").actions == plain.actions


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
        seen.clear()
        model.eval_batch(batch())
        assert set(seen) == {None}


def test_one_process_takes_what_transfers_usually_cost() -> None:
    with job(2):
        profile = pipeline([LayerDesc(nn.Linear, 6, 6), LayerDesc(nn.Linear, 6, 4)]).profile(
            batch()
        )
    assert profile.transfer == TYPICAL


def test_each_value_that_crosses_between_ranks_is_sent_and_received_twice() -> None:
    found = {("S", 0): 3e-3, ("R", 1): 6e-3, ("F", 0): 1.0}
    size = 10**5
    for placement, crossings in ((Placement("loop", 2, 2), 3), (Placement("vee", 2, 2), 2)):
        link, transfer = between_ranks(placement, found, [size] * 3, 5e-5)
        # A value and its gradient.
        assert transfer.sends(size) == pytest.approx(3e-3 / (2 * crossings))
        assert transfer.receives(size) == pytest.approx(6e-3 / (2 * crossings))
        assert link.seconds(size) == 5e-5


def test_ranks_that_share_processors_are_measured_in_processor_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with job(2) as running:
        assert clock_for(running) is time.perf_counter
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: ())
        assert clock_for(running) is time.thread_time


def test_nothing_stays_in_memory() -> None:
    relu = nn.functional.relu
    with job(2):
        model = pipeline([LayerDesc(nn.Linear, 6, 64), relu, LayerDesc(nn.Linear, 64, 4)])
        model.profile(batch())
        gc.collect()
        before = allocated_bytes()
        model.profile(batch())
        gc.collect()
        assert allocated_bytes() == before
