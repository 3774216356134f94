"""Experts spread over ranks: the single model's numbers, checkpoints, failures, and overlap."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.incubate.distributed.models.moe import MoELayer
from paddle.nn import functional

import fleetpipe
from fleetpipe import fleet, parity
from fleetpipe.contrib.experts import AuxiliaryLoss, Experts
from fleetpipe.dygraph import VocabularyHead, VocabularyLoss
from fleetpipe.errors import FleetPipeError
from fleetpipe.fleet.meta_parallel import LayerDesc
from fleetpipe.job.job import current_job
from fleetpipe.mesh.groups import DirectGroup
from fleetpipe.paddle_api import VERSION
from tests import pipelines
from tests.fixtures import Call
from tests.pipelines import ROWS, pipeline, sgd
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


@contextmanager
def job(micro_batches: int, schedule: str = "1F1B", **degrees: Any) -> Iterator[Any]:
    fleet.init(is_collective=True, strategy=pipelines.strategy(micro_batches, schedule, **degrees))
    try:
        yield current_job()
    finally:
        fleet.shutdown()


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
    with job(micro_batches, schedule, **degrees) as running:
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


def beside_each(runs: list[Any]) -> tuple[list[dict[str, Any]], str]:
    """What each run finds, and what is said of experts that ranks do not divide."""
    return [beside_the_single_model(*run) for run in runs], refused(runs[0][-1])


def through_layouts(folder: Path, layouts: list[tuple[int, dict[str, int]]]) -> list[Any]:
    """Trains a step under each layout from the checkpoint of the one before.

    Returns:
        For each the loss, the state that it begins with, and the one that it ends with.
    """
    legs = []
    for step, (micro_batches, degrees) in enumerate(layouts):
        with job(micro_batches, **degrees) as running:
            pipe, optimizer = built()
            manager = fleetpipe.CheckpointManager(folder)
            if step:
                manager.restore(step=step - 1, model=pipe, optimizer=optimizer)
            begin = numbers_of(pipe.layers.full_state_dict())
            loss = pipe.train_batch(part(running, micro_batches, step), optimizer)
            manager.save(step, model=pipe, optimizer=optimizer)
            manager.wait()
            legs.append((float(loss), begin, numbers_of(pipe.layers.full_state_dict())))
    return legs


def numbers_of(state: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in state.items()}


def one_dies(degrees: dict[str, int]) -> str:
    """The last rank's process ends within its second exchange; returns what the others raise."""
    with job(2, own={"timeout": 20}, **degrees):
        pipe, optimizer = built()
        if fleet.worker_index() == fleet.worker_num() - 1:
            calls = itertools.count()
            exchange = DirectGroup.all_to_all

            def all_to_all(group: Any, parts: Any) -> Any:
                if next(calls) == 4:
                    os._exit(9)
                return exchange(group, parts)

            DirectGroup.all_to_all = all_to_all  # type: ignore[method-assign]
        try:
            pipe.train_batch(part(current_job(), 2, 0), optimizer)
        except FleetPipeError as error:
            return str(error)
    return "nothing"


def without_tokens(degrees: dict[str, int]) -> list[float]:
    """Trains two steps in which the second rank's experts get nothing; returns the losses."""
    with job(1, own={"timeout": 20}, **degrees) as running:
        pipe = pipeline([LayerDesc(OnData)], loss_fn=nn.MSELoss())
        optimizer = sgd(pipe)
        data = part(running, 1, 0)
        return [float(pipe.train_batch(data, optimizer)) for _ in range(2)]


def saved_with_a_head(folder: Path, degrees: dict[str, int]) -> None:
    with job(1, own={"timeout": 20}, **degrees):
        layers = [LayerDesc(Routed), VocabularyHead(WIDTH, 6)]
        pipeline(layers, loss_fn=VocabularyLoss()).layers.save_state_dict(folder)


def refused(degrees: dict[str, int]) -> str:
    with job(1, **degrees):
        try:
            Experts(Routed.expert, 3)
        except FleetPipeError as error:
            return str(error)
    return "nothing"


pytestmark = pytest.mark.skipif(VERSION.startswith("2."), reason="2.6.2 has no ep_degree")
SPREAD = {"pp": 2, "sharding": 2, "ep": 2}


def test_the_single_model_beside_spread_experts(on_ranks: Call) -> None:
    """With one micro-batch sums have one order: all bits; with two those of experts have not."""
    runs = [
        (Routed, 1, "ZBV", SPREAD),
        (Routed, 2, "1F1B", SPREAD),
        (Stock, 2, "1F1B", {"pp": 2, "dp": 2, "ep": 2}),
        (Routed, 1, "1F1B", {"pp": 2, "mp": 2, "ep": 2}),
        (Routed, 1, "1F1B", {**SPREAD, "sharding_stage": 2}),
    ]
    found, refusals = zip(*on_ranks(beside_each, 4, runs, timeout=240))
    for message in refusals:
        assert "3 experts cannot be spread over 2 ranks" in message
        assert "a multiple of 2, say 4" in message
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
    layouts = [(1, SPREAD), (1, {"pp": 2, "sharding": 2}), (2, {"pp": 4}), (1, SPREAD)]
    legs = on_ranks(through_layouts, 4, tmp_path / "run", layouts, timeout=240)[0]
    for (_, _, saved), (_, restored, _) in itertools.pairwise(legs):
        assert list(saved) == list(restored)
        for name, value in saved.items():
            np.testing.assert_array_equal(restored[name], value, err_msg=name)
    alone = through_layouts(tmp_path / "other", [(2, {"pp": 4})] * 4)
    np.testing.assert_allclose([leg[0] for leg in legs], [leg[0] for leg in alone], rtol=1e-5)


def test_a_rank_that_dies_within_an_exchange_is_named(on_ranks: Call) -> None:
    messages = on_ranks(one_dies, 4, SPREAD, check=False)
    assert messages.pop() is None
    for message in messages:
        assert "rank 3" in message, message


def test_a_rank_whose_experts_get_no_token_of_data(on_ranks: Call) -> None:
    """Data need no gradient: that rank came by no exchange in backward, and the other waited."""
    first, second = on_ranks(without_tokens, 2, {"dp": 2, "ep": 2})
    assert first == second


def test_a_vocabulary_head_is_saved_by_the_ranks_of_one_pipeline(
    on_ranks: Call, tmp_path: Path
) -> None:
    """Those with its experts are of another replica, which writes no layers."""
    on_ranks(saved_with_a_head, 2, tmp_path / "layers", {"dp": 2, "ep": 2})
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
    with job(1, **degrees), pytest.raises(FleetPipeError) as raised:
        built(Parts)
    return str(raised.value)


def test_a_gate_with_a_loss_sees_no_part_of_the_tokens(on_ranks: Call) -> None:
    for message in on_ranks(built_of_parts, 4, {"pp": 2, "mp": 2}):
        assert "mp_group of a MoELayer" in message
        assert "got: GShardGate" in message


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
