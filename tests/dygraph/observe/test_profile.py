"""Costs are measured by stage, action and layer, and a list of layers is built by a plan."""

from __future__ import annotations

import functools
import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import paddle
import pytest
from paddle import nn

from fleetpipe import systems
from fleetpipe.dygraph import random_keys
from fleetpipe.dygraph.backward import linear_and_embedding
from fleetpipe.dygraph.observe.layer_meter import LayerMeter
from fleetpipe.dygraph.observe.measuring import ActionMeter, clock_for, in_turn
from fleetpipe.dygraph.observe.profile import TYPICAL, between_ranks
from fleetpipe.engine.observer import Blocked, Played
from fleetpipe.errors import ConfigError, ScheduleError
from fleetpipe.fleet.meta_parallel import LayerDesc
from fleetpipe.paddle_api.device import allocated_bytes
from fleetpipe.profiling import LayerCost, PipelinePlan, Profile, plan
from fleetpipe.schedules import Action, Costs, Edge, Free, Op, Placement, Recv, Reduce, Send, build
from fleetpipe.transport import MessageKey
from tests.fixtures import Patch
from tests.pipelines import batch, bits, job, mlp_layers, model_in_job, pipeline, sgd


def test_forward_and_backward_are_measured_in_turn_on_any_placement() -> None:
    for placement in (Placement("loop", 3, 1), Placement("loop", 2, 3), Placement("vee", 2, 2)):
        for kinds, slices in (("B", 1), ("IW", 1), ("B", 4)):
            schedule = in_turn(placement, 5, kinds, slices)
            schedule.verify()
            count = 5 * slices * placement.stages * (1 + len(kinds))
            assert sum(map(len, schedule.actions)) == count
    for name, slices in (("1F1B", 1), ("Seq1F1B", 2)):
        options = {"slices": slices} if slices > 1 else {}
        plain = build(name, ranks=3, micro_batches=5, **options)
        assert in_turn(plain.placement, 5, "B", slices).actions == plain.actions


def test_ranks_that_share_processors_are_measured_in_processor_time(
    monkeypatch: Patch,
) -> None:
    with job(2) as running:
        assert clock_for(running) is time.perf_counter
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: ())
        assert clock_for(running) is time.thread_time


NOBODY = cast(Played, None)


class Meter:
    """An ActionMeter with a clock that each operation sets forward."""

    def __init__(self, last: str, units: int = 1) -> None:
        self.now, self.seconds = 0.0, 1.0
        self.meter = ActionMeter(last, lambda: self.now, units)

    def run(self, ops: list[Op]) -> None:
        for op in ops:
            assert self.meter.wrap(NOBODY, op, self.work)() is None

    def work(self) -> None:
        self.now += self.seconds


def test_a_batch_is_added_up_by_stage_and_the_median_of_batches_counts() -> None:
    one = Meter("B")
    for one.seconds in (100.0, 1.0, 5.0, 2.0):
        one.run([Action("F", 1, 0), Action("F", 1, 1), Action("B", 1, 0), Free(1, 0)])
        one.meter.end_batch(counts=one.seconds < 100)
    # A release counts with the backward.
    assert one.meter.seconds() == {("F", 1, 0): 4.0, ("B", 1, 0): 4.0}
    two = Meter("B", units=2)
    two.run([Action("F", 0, 0), Action("F", 0, 1), Action("F", 0, 2), Free(0, 3)])
    two.meter.end_batch(counts=True)
    # The third is the first slice of the next micro-batch.
    assert two.meter.seconds() == {("F", 0, 0): 2.0, ("F", 0, 1): 1.0, ("B", 0, 1): 1.0}


def test_transfers_count_with_the_stage_that_does_them_without_their_wait() -> None:
    one = Meter("W")
    waits: Iterator[Blocked | None] = iter([Blocked(0, MessageKey("F", 0, 1, "", 0)), None])
    receive = one.meter.wrap(NOBODY, Recv("F", Edge(0, 1), 0), lambda: next(waits))
    assert receive() is not None
    assert receive() is None
    one.run([Send("F", Edge(0, 1), 0), Send("B", Edge(1, 2), 0), Recv("B", Edge(3, 4), 0)])
    one.meter.end_batch(counts=True)
    assert set(one.meter.seconds()) == {("R", 1, 0), ("S", 0, 0), ("S", 2, 0), ("R", 3, 0)}
    # What is none of these is left alone.
    assert one.meter.wrap(NOBODY, Reduce(), one.work) == one.work


def test_the_costs_of_a_model_are_measured_and_a_strategy_reads_them(tmp_path: Path) -> None:
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
    # One process takes what transfers usually cost.
    assert measured.transfer == TYPICAL
    assert Profile.read(path) == measured
    Costs.from_json(path.read_text()).check_stages(2)
    most = 4 * int(max(measured["bytes"]))
    with model_in_job(2, schedule="ZBH1", costs=path, memory_cap=most, layers=layers) as model:
        assert float(model.train_batch(batch(), sgd(model))) > 0
    refused = pytest.raises(ScheduleError, match="at most 1 bytes")
    with job(2, schedule="ZBH1", costs=path, memory_cap=1), refused:
        pipeline(layers)


def test_layers_are_measured_under_the_seeds_of_a_batch() -> None:
    seen = []

    def note(value: paddle.Tensor) -> paddle.Tensor:
        seen.append(random_keys.current_keys())
        return value

    with job(2):
        model = pipeline([LayerDesc(nn.Linear, 6, 4), note, LayerDesc(nn.Linear, 4, 4)])
        model.profile(batch())
        # A step seeds the generators before each layer, which takes time.
        assert None not in seen
        assert random_keys.current_keys() is None


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
    monkeypatch.setattr(linear_and_embedding, "_tried", {})
    functions = {0: layer}
    meter = LayerMeter(1, lambda _, value: (functions, value), lambda _: {0: layer})
    run = meter.run_of(0)
    for _ in range(2):
        run(paddle.rand([rows, 8]), None)
    assert [one.waiting for one in meter.samples[0, 0]] == [waiting * rows * 8 * 4] * 2


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


M = 4


def names() -> list[str]:
    """The names of the layers of the model."""
    return ["Linear", nn.functional.tanh.__name__] * 3 + ["Linear"]


def costs(splits: bool = True, held: int = 0) -> Profile:
    """A profile of the model, with costs by hand: the last layer takes longest."""
    parts = {"input_grad": 1.0, "weight_grad": 1.0} if splits else {}
    layers = [
        LayerCost(name, 1.0 + 4 * (i == 6), 2.0, output=8, held=held, saved=held // 2, **parts)  # type: ignore[arg-type]
        for i, name in enumerate(names())
    ]
    return Profile(tuple(layers))


def trained(**options: Any) -> dict[str, bytes]:
    """The bits of all parameters after two steps."""
    model = pipeline(mlp_layers(), **options)
    optimizer = sgd(model)
    for seed in range(2):
        model.train_batch(batch(M, seed), optimizer)
    made = options.get("plan")
    if isinstance(made, PipelinePlan):
        assert model.layers.partition.boundaries == made.partition.boundaries
        assert model.schedule == made.schedule
    return bits(model.layers.full_state_dict())


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("splits", [True, False])
def test_a_planned_model_trains_to_the_same_bits(ranks: int, splits: bool, tmp_path: Path) -> None:
    made = plan(costs(splits, held=100), ranks, M, memory_cap=600)
    made.write(tmp_path / "plan.json")
    with job(ranks, micro_batches=M):
        assert trained() == trained(plan=made) == trained(plan=tmp_path / "plan.json")


def test_another_number_of_micro_batches_may_follow() -> None:
    made = plan(costs(), 2, M)
    with model_in_job(2, micro_batches=M, layers=mlp_layers(), plan=made) as model:
        optimizer = sgd(model)
        model.train_batch(batch(M), optimizer)
        model.accumulate_steps = M - 1
        assert float(model.train_batch(batch(M - 1), optimizer)) > 0
        assert model.schedule.micro_batches == M - 1


def test_what_the_plan_recomputes_is_not_held() -> None:
    block = LayerDesc(nn.TransformerEncoderLayer, 6, 2, 2048, dropout=0.0)
    blocks = [LayerDesc(nn.Linear, 6, 6), block, block, LayerDesc(nn.Linear, 6, 4)]
    data = [paddle.rand([M * 2, 3, 6]), paddle.zeros([M * 2, 3, 1], "int64")]
    with model_in_job(1, micro_batches=M, layers=blocks) as model:
        profile = model.profile(data)
        assert [layer.saved > 0 for layer in profile.layers] == [False, True, True, False]
        # Of the schedule that both have: times measured beside other programs choose another one.
        chosen = functools.partial(plan, profile, 1, M, search=("recompute",), optimizer_copies=0)
        free = chosen()
        [peak] = free.predicted.peak_bytes
        half = chosen(memory_cap=peak - profile.layers[1].saved // 2)
        before, after = (_held(pipeline(blocks, plan=made), data) for made in (free, half))
        assert half.recompute[0]
        saved = sum(profile.layers[layer].saved for layer in half.recompute[0])
        assert before - after == pytest.approx(saved, rel=0.02)


def _held(model: Any, data: list[Any]) -> int:
    """The bytes that a forward leaves, before its backward."""
    layers = model.layers
    layers.train()
    value = data[0][:2]
    value.stop_gradient = False
    gc.collect()
    before = allocated_bytes()
    output = layers.owned_stages.function(0)(value, None)
    held = allocated_bytes() - before
    del output
    return held


MADE = plan(costs(), 2, M)
OTHER = "FThenB" if MADE.schedule.name != "FThenB" else "ZBH1"


@pytest.mark.parametrize(
    ("of_job", "options", "message"),
    [
        ({}, {"seg_method": "balanced"}, "leave seg_method"),
        ({}, {"recompute_interval": 1, "recompute_ctx": {}}, "leave seg_method"),
        ({}, {"num_virtual_pipeline_stages": 3}, "num_virtual_pipeline_stages=3"),
        ({}, {"use_dualpipev": True}, "use_dualpipev=True"),
        ({}, {"layers": mlp_layers(blocks=2)}, "number of layers"),
        ({}, {"plan": "nowhere.json"}, "No such file"),
        ({}, {"plan": costs()}, r"(?s)no plan of fleetpipe's.*got: Profile"),
        ({"micro_batches": 8}, {}, "accumulate_steps=8"),
        ({"pp": 3}, {}, r"(?s)expected: 2 ranks.*3 ranks"),
        ({"schedule": OTHER}, {}, f"schedule_mode='{OTHER}'"),
        ({"slices": 2}, {}, "slices=2"),
    ],
)
def test_what_contradicts_a_plan_is_refused(
    of_job: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    given = {"plan": MADE, **options}
    with job(**{"pp": 2, "micro_batches": M, **of_job}), pytest.raises(ConfigError, match=message):
        pipeline(given.pop("layers", mlp_layers()), **given)


def test_a_plan_does_not_lift_the_memory_cap_of_the_strategy() -> None:
    made = plan(costs(splits=False), 2, M)
    most = max(made.schedule.simulate().peak_activations)
    with job(2, micro_batches=M, memory_cap=most):
        trained(plan=made)
    with (
        job(2, micro_batches=M, memory_cap=most - 1),
        pytest.raises(ScheduleError, match="passes the memory cap"),
    ):
        pipeline(mlp_layers(), plan=made)
