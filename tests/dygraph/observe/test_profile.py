"""Measured costs: one figure for each stage and kind, and a model that is as before."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe import parity
from fleetpipe.contrib.experts import Experts
from fleetpipe.dygraph import random_keys, sequences
from fleetpipe.dygraph.observe.layer_meter import LayerMeter
from fleetpipe.dygraph.observe.profile import TYPICAL, between_ranks
from fleetpipe.errors import ConfigError
from fleetpipe.fleet.meta_parallel import LayerDesc
from fleetpipe.paddle_api.device import allocated_bytes
from fleetpipe.paddle_api.layer import MoELayer
from fleetpipe.profiling import LayerDegrees, Link, PipelinePlan, Profile, Transfer, plan
from fleetpipe.schedules import Costs, Placement
from tests.dygraph import sliced
from tests.pipelines import ROWS, batch, bits, job, model_in_job, pipeline, sgd


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
def test_what_is_kept_between_i_and_w_is_measured(layer: Any, waiting: int, rows: int) -> None:
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


def test_each_value_that_crosses_between_ranks_is_sent_and_received_twice() -> None:
    found = {("S", 0, 0): 3e-3, ("R", 1, 0): 6e-3, ("F", 0, 0): 1.0}
    size = 10**5
    for placement, crossings in ((Placement("loop", 2, 2), 3), (Placement("vee", 2, 2), 2)):
        link, transfer = between_ranks(placement, found, [size] * 3, 5e-5)
        # A value and its gradient.
        assert transfer.sends(size) == pytest.approx(3e-3 / (2 * crossings))
        assert transfer.receives(size) == pytest.approx(6e-3 / (2 * crossings))
        assert link.seconds(size) == 5e-5


class Mixed(nn.Layer):
    """Attention, and two mixtures of two of six experts: a list, and Paddle's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gate = nn.Linear(8, 24), nn.Linear(8, 6)
        self.mixture = Experts(lambda: nn.Linear(8, 8), 6)
        experts = nn.LayerList([nn.Linear(8, 8) for _ in range(6)])
        layer: Any = MoELayer
        self.moe = layer(8, experts, gate={"type": "naive", "top_k": 2})

    def forward(self, x: Any) -> Any:
        query, key, value = self.qkv(x).reshape([*x.shape[:2], 4, -1]).split(3, axis=-1)
        x = sequences.attention(query, key, value).reshape(x.shape)
        weights, choices = paddle.topk(self.gate(x.reshape([-1, 8])), 2)
        return self.moe(self.mixture(x.reshape([-1, 8]), choices, weights).reshape(x.shape))


def test_tokens_of_experts_and_queries_are_counted() -> None:
    data = [paddle.randn([4 * ROWS, 5, 8]), paddle.zeros([4 * ROWS, 5, 8])]
    with job(2):
        model = pipeline([LayerDesc(nn.Linear, 8, 8), LayerDesc(Mixed)], loss_fn=nn.MSELoss())
        profile = model.profile(data)
    plain, mixed = profile.layers
    tokens = ROWS * 5
    assert (plain.loads, plain.queries, profile.degrees) == ((), 0, LayerDegrees())
    assert mixed.expert_parameters == 2 * 6 * 9 * 8 * 4
    assert mixed.routed == 2 * 2 * tokens * 8 * 4
    assert (mixed.queries, mixed.keys, mixed.heads) == (tokens * 32, tokens * 64, (4,))
    # In six samples.
    assert [len(loads) for loads in mixed.loads] == [6, 6]
    assert [sum(loads) for loads in mixed.loads] == [6 * 2 * tokens] * 2
    assert 0 < mixed.expert_share < 1
    assert profile.with_degrees(ep=3).layers[1].exchanges == 10


@pytest.mark.parametrize("slices", [0, 3])
def test_nothing_stays_in_memory(slices: int) -> None:
    data = sliced.batch(2 * ROWS, 24)
    options = {"slices": slices} if slices else {}
    with job(2, 2, "Seq1F1B" if slices else "1F1B", **options):
        model = pipeline(sliced.layers(), loss_fn=sliced.loss)
        model.profile(data)
        gc.collect()
        before = allocated_bytes()
        model.profile(data)
        gc.collect()
        # Less, where garbage of an earlier test goes meanwhile.
        assert allocated_bytes() <= before


@pytest.mark.parametrize("slices", [3, (4, 2, 1)])
def test_slices_are_measured_one_by_one(slices: Any, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    data = sliced.batch(2 * ROWS, 210)
    lengths = (70, 70, 70) if slices == 3 else (120, 60, 30)
    with job(2, 2, "Seq1F1B", slices=slices):
        model = pipeline(sliced.layers(dropout=0.1), loss_fn=sliced.loss)
        before = bits(model.layers.state_dict())
        measured = model.profile(data, path)
        assert bits(model.layers.state_dict()) == before
    assert Profile.read(path) == measured
    assert measured.slice_lengths == lengths
    assert [len(part) for part in measured.slices] == [7, 7, 7]
    attention = [part[1] for part in measured.slices]
    width = 4 * sliced.WIDTH * ROWS
    for index, (one, length) in enumerate(zip(attention, lengths)):
        assert one.forward > 0
        assert one.backward is not None
        assert one.backward > 0
        assert one.output == width * length
        # The weights of all places seen, in the middle of what is held.
        seen = sum(lengths[: index + 1])
        scores = 4 * ROWS * length * seen
        assert scores < one.held < scores + 20 * width * seen
    with job(2, 2, "auto", costs=path):
        model = pipeline(sliced.layers(dropout=0.1), loss_fn=sliced.loss)
        assert model.schedule.slices in (1, 3)


def test_a_plan_of_slices_trains_as_the_single_model_does() -> None:
    data = sliced.batch(2 * ROWS, 24)
    with job(2, 2, "Seq1F1B", slices=2):
        model = pipeline(sliced.layers(), loss_fn=sliced.loss)
        measured = model.profile(data)
    # As if slices took no longer in all than whole sequences do: they are that short here. And as
    # if layers took equally long: where one takes far longer, other schedules fit the cap as well.
    times = {"forward": 1e-3, "backward": 2e-3, "input_grad": 1e-3, "weight_grad": 1e-3}
    *layers, loss = (replace(layer, **times) for layer in (*measured.layers, measured.loss))
    half = [
        replace(layer, forward=5e-4, backward=1e-3, held=1, working=1) for layer in (*layers, loss)
    ]
    measured = replace(
        measured,
        layers=tuple(layers),
        loss=loss,
        links=(Link(0, 0),),
        transfer=Transfer(),
        slices=(tuple(half),) * 2,
    )
    cap = max(plan(measured, 2, 2, search=()).predicted.peak_bytes) - 1
    chosen = plan(measured, 2, 2, memory_cap=cap, search=("schedule",))
    assert (chosen.schedule.name, chosen.schedule.slices) == ("Seq1F1B", 2)
    assert PipelinePlan.loads(chosen.dumps()) == chosen
    assert chosen.schedule_for(5).slices == 2
    with model_in_job(2, 2, layers=sliced.layers(), loss_fn=sliced.loss, plan=chosen) as model:
        session = parity.begin(model, sgd(model))
        session.step(data)
        assert session.report.bit_exact, session.report.verdict()
    refused = pytest.raises(ConfigError, match="lengths of another number of slices")
    with job(2, 2, slices=(1, 2, 1)), refused:
        pipeline(sliced.layers(), loss_fn=sliced.loss, plan=chosen)
