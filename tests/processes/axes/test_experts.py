"""Experts spread over ranks: the single model's numbers, checkpoints, failures, and overlap."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.incubate.distributed.models.moe import MoELayer
from paddle.nn import functional

from fleetpipe import fleet, parity
from fleetpipe.contrib.experts import AuxiliaryLoss, Experts
from fleetpipe.dygraph import VocabularyHead, VocabularyLoss
from fleetpipe.errors import FleetPipeError
from fleetpipe.fleet.meta_parallel import LayerDesc
from fleetpipe.paddle_api import VERSION
from tests.fixtures import Call
from tests.pipelines import ROWS, begun, pipeline, sgd, strategy
from tests.processes.axes.test_hybrid import trained_through
from tests.processes.pipeline import overlap_worker as cases

WIDTH, LENGTH, EXPERTS = 8, 5, 4


class Routed(nn.Layer):
    """Two of four experts for each token, one of which gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.mixture = Experts(self.expert, EXPERTS)
        self.loss: Any = None

    @staticmethod
    def expert() -> nn.Layer:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Any) -> Any:
        tokens = self.norm(x).reshape([-1, WIDTH])
        scores = functional.softmax(self.gate(tokens) + paddle.to_tensor([0.0, 0.0, -1e9, 0.0]))
        weights, choices = paddle.topk(scores, 2)
        self.loss = (scores.mean(axis=0) ** 2).sum()
        return x + self.mixture(tokens, choices, weights).reshape(x.shape)

    def get_loss(self) -> Any:
        loss, self.loss = self.loss, None
        return loss


class Stock(nn.Layer):
    """Paddle's own layer: each rank builds its experts, and counts them from 0."""

    def __init__(self) -> None:
        super().__init__()
        hcg = fleet.get_hybrid_communicate_group()
        here = EXPERTS // hcg.get_expert_parallel_world_size()
        experts = nn.LayerList([Routed.expert() for _ in range(here)])
        options = {"moe_group": hcg.get_expert_parallel_group()}
        self.norm = nn.LayerNorm(WIDTH)
        self.moe = MoELayer(WIDTH, experts, {"type": "naive", "top_k": 2}, **options)

    def forward(self, x: Any) -> Any:
        return x + self.moe(self.norm(x))


class OnData(Stock):
    """On inputs that need no gradient; all tokens go to the experts of the first rank."""

    def __init__(self) -> None:
        super().__init__()
        self.moe.gate.gate.bias.set_value(paddle.to_tensor([9.0, 9.0, -9.0, -9.0]))

    def forward(self, x: Any) -> Any:
        return self.moe(self.norm(x).detach())


def built(block: type[nn.Layer] = Routed) -> tuple[Any, Any]:
    """A pipeline with a mixture in each half, and an optimizer with a clip and a state."""
    layers = [LayerDesc(nn.Linear, WIDTH, WIDTH), *[LayerDesc(block)] * 3]
    pipe = pipeline(layers, loss_fn=AuxiliaryLoss(nn.MSELoss(), 0.1))
    clip = nn.ClipGradByGlobalNorm(0.1)
    adam = paddle.optimizer.AdamW(0.01, parameters=pipe.parameters(), grad_clip=clip)
    return pipe, fleet.distributed_optimizer(adam)


def part(running: Any, micro_batches: int, seed: int) -> list[Any]:
    """This replica's part of a batch."""
    numbers = np.random.default_rng(seed)
    rows = micro_batches * ROWS
    shape = (running.degrees.replicas * rows, LENGTH, WIDTH)
    whole = [numbers.standard_normal(shape).astype("float32") for _ in range(2)]
    mine = slice(running.replica * rows, (running.replica + 1) * rows)
    return [paddle.to_tensor(tensor[mine]) for tensor in whole]


def beside_the_single_model(
    block: type[nn.Layer], micro_batches: int, schedule: str, degrees: dict[str, int]
) -> dict[str, Any]:
    with begun(strategy(micro_batches, schedule, **degrees)) as running:
        pipe, optimizer = built(block)
        session = parity.begin(pipe, optimizer)
        for step in range(2):
            session.step(part(running, micro_batches, step))
        states = [n for n in optimizer.state_dict() if "moment1" in n]
        return {
            "verdict": session.report.verdict(),
            "passed": session.report.passed,
            "names": [name for name in pipe.layers.own_state() if "experts" in name],
            "moments": len(states),
        }


def beside_each(runs: list[Any]) -> tuple[list[dict[str, Any]], str, str]:
    """What each run finds, and what is said of experts that no ranks can have."""
    found = [beside_the_single_model(*run) for run in runs]
    return found, refused(runs[0][-1]), built_of_parts({"pp": 2, "mp": 2})


def with_replicas(folder: Path, degrees: dict[str, int]) -> list[float]:
    saved_with_a_head(folder, degrees)
    return without_tokens(degrees)


def own_part(running: Any, step: int) -> list[Any]:
    """This replica's part of two micro-batches."""
    return part(running, 2 // running.degrees.replicas, step)


def without_tokens(degrees: dict[str, int]) -> list[float]:
    """Trains two steps in which the second rank's experts get nothing; returns the losses."""
    with begun(strategy(1, own={"timeout": 20}, **degrees)) as running:
        pipe = pipeline([LayerDesc(OnData)], loss_fn=nn.MSELoss())
        optimizer = sgd(pipe)
        data = part(running, 1, 0)
        return [float(pipe.train_batch(data, optimizer)) for _ in range(2)]


def saved_with_a_head(folder: Path, degrees: dict[str, int]) -> None:
    with begun(strategy(1, own={"timeout": 20}, **degrees)):
        layers = [LayerDesc(Routed), VocabularyHead(WIDTH, 6)]
        pipeline(layers, loss_fn=VocabularyLoss()).layers.save_state_dict(folder)


def refused(degrees: dict[str, int]) -> str:
    with begun(strategy(1, **degrees)):
        try:
            Experts(Routed.expert, 3)
        except FleetPipeError as error:
            return str(error)
    return "nothing"


pytestmark = pytest.mark.skipif(VERSION.startswith("2."), reason="2.6.2 has no ep_degree")
SHARED = {"pp": 2, "sharding": 2}
SPREAD = {**SHARED, "ep": 2}


def test_the_single_model_beside_spread_experts(on_ranks: Call) -> None:
    """With one micro-batch sums have one order: all bits; with two those of experts have not."""
    runs = [
        (Routed, 1, "ZBV", SPREAD),
        (Routed, 2, "1F1B", SPREAD),
        (Stock, 2, "1F1B", {"pp": 2, "dp": 2, "ep": 2}),
        (Routed, 1, "1F1B", {"pp": 2, "mp": 2, "ep": 2}),
        (Routed, 1, "1F1B", {**SPREAD, "sharding_stage": 2}),
    ]
    found, of_experts, of_gates = zip(*on_ranks(beside_each, 4, runs, timeout=240))
    for message in of_experts:
        assert "3 experts cannot be spread over 2 ranks" in message
        assert "a multiple of 2, say 4" in message
    for message in of_gates:
        assert "mp_group of a MoELayer" in message
        assert "got: GShardGate" in message
    for exact, several, stock, members, scattered in found:
        assert "bit-exact" in scattered["verdict"], scattered["verdict"]
        assert "bit-exact" in exact["verdict"], exact["verdict"]
        assert members["passed"], members["verdict"]
        assert several["passed"], several["verdict"]
        assert stock["passed"], stock["verdict"]
    # Every rank has half of the experts and their state; each parameter's state is on one rank.
    names = [name for rank in found for name in rank[0]["names"]]
    assert len(names) == len(set(names)) == 3 * 4 * EXPERTS
    assert {len(rank[0]["names"]) for rank in found} == {4 * 2, 8 * 2}


def test_checkpoints_know_experts_by_their_numbers(on_ranks: Call, tmp_path: Path) -> None:
    alone = {"pp": 4, "micro_batches": 2}
    spread, gathered = ({**degrees, "micro_batches": 1} for degrees in (SPREAD, SHARED))
    jobs = [spread, gathered, alone, spread]
    legs = on_ranks(trained_through, 4, tmp_path / "run", jobs, built, own_part, timeout=240)[0]
    for (_, _, saved), (_, restored, _) in itertools.pairwise(legs):
        assert restored == saved
    one_process = trained_through(tmp_path / "other", [alone] * 4, built, own_part)
    np.testing.assert_allclose([leg[0] for leg in legs], [leg[0] for leg in one_process], rtol=1e-5)


def test_experts_over_replicas(on_ranks: Call, tmp_path: Path) -> None:
    """A rank gets no token of data, which need no gradient; a head is saved by one pipeline."""
    first, second = on_ranks(with_replicas, 2, tmp_path / "layers", {"dp": 2, "ep": 2})
    # The rank without tokens came by no exchange in backward, and the other one waited.
    assert first == second
    # The ranks with the head's experts are of another replica, which writes no layers.
    (head,) = (tmp_path / "layers").glob("layer_01-*")
    assert paddle.load(str(head))["weight"].shape == [6, WIDTH]


class Parts(nn.Layer):
    """Paddle's layer with a gate that leaves a loss of the tokens of one member along mp."""

    def __init__(self) -> None:
        super().__init__()
        members = fleet.get_hybrid_communicate_group().get_model_parallel_group()
        experts = nn.LayerList([Routed.expert() for _ in range(EXPERTS)])
        self.moe = MoELayer(WIDTH, experts, {"type": "gshard"}, mp_group=members)


def built_of_parts(degrees: dict[str, int]) -> str:
    with begun(strategy(1, **degrees)), pytest.raises(FleetPipeError) as raised:
        built(Parts)
    return str(raised.value)


def test_the_bits_are_those_of_halves_one_after_the_other(on_ranks: Call) -> None:
    """With dropout, casts, recompute, and a layer that is in both stages of a rank."""
    runs = [(overlap, *how) for how in (("keyed", 0), ("fleet", 1)) for overlap in (False, True)]
    for found in on_ranks(cases.each, 4, runs, timeout=240):
        for apart, together in zip(found[::2], found[1::2]):
            assert together["numbers"] == apart["numbers"]
            assert apart["handed"] == 0
            assert together["handed"] > 0
            assert together["passed"], together["verdict"]


@pytest.mark.parametrize("how", ["backward", "dies"])
def test_an_expert_that_fails_ends_both_halves(on_ranks: Call, how: str) -> None:
    messages = on_ranks(cases.fails, 4, how, check=False)
    own = messages.pop()
    if how == "dies":
        assert own is None
    else:
        assert "an expert failed" in own
        assert "raised at rank 1, operation (F" in own
    for message in messages:
        assert "rank 3" in message, message
    # The one that exchanges tokens with it.
    assert "operation (F" in messages[2]
