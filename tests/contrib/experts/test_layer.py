"""Experts in one process: a layer of them, a list as libraries write it, what a profile counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import fleet, parity
from fleetpipe.contrib.experts import Experts
from fleetpipe.dygraph import sequences
from fleetpipe.errors import ConfigError, UsageError
from fleetpipe.fleet.meta_parallel import LayerDesc
from fleetpipe.mesh import SoleGroup
from fleetpipe.paddle_api.eager_operations import CAN_GATHER_NOTHING
from fleetpipe.paddle_api.layer import MoELayer
from fleetpipe.profiling import LayerDegrees
from tests.contrib.experts.test_operations import DenseMixture, experts_of
from tests.pipelines import ROWS, job, pipeline


class ExchangeCounter(SoleGroup):
    """This process alone, and how often it exchanged."""

    exchanges = 0

    def all_to_all(self, parts: Sequence[Any]) -> list[Any]:
        self.exchanges += 1
        return super().all_to_all(parts)


@pytest.mark.parametrize("tokens", [6, 0], ids=["all_dropped", "no_token"])
def test_backward_comes_by_the_exchanges_without_a_token(tokens: int) -> None:
    """Another rank that sent tokens here waits for their gradients."""
    if not tokens and not CAN_GATHER_NOTHING:
        pytest.skip("2.6.2 has no sum of no numbers")
    mixture = Experts(lambda: nn.Linear(4, 4), 2)
    group = mixture._group = ExchangeCounter()
    choices = paddle.full([tokens, 2], -1, "int64")
    output = mixture(paddle.ones([tokens, 4]), choices, paddle.ones([tokens, 2]))
    assert list(output.shape) == [tokens, 4]
    assert float(output.abs().sum()) == 0
    forward = group.exchanges
    output.sum().backward()
    if CAN_GATHER_NOTHING:
        assert group.exchanges == forward + 2


@pytest.mark.parametrize(
    ("tokens", "choices", "weights"),
    [
        ([6, 4], [6], [6]),
        ([6, 4], [6, 2], [6, 1]),
        ([6, 4], [3, 2], [3, 2]),
        ([2, 3, 4], [6, 2], [6, 2]),
    ],
)
def test_a_routing_of_other_shapes_or_dtypes_is_refused(
    tokens: list[int], choices: list[int], weights: list[int]
) -> None:
    mixture = Experts(lambda: nn.Linear(4, 4), 2)
    with pytest.raises(UsageError, match="as many choices of experts as weights") as caught:
        mixture(paddle.ones(tokens), paddle.zeros(choices, "int64"), paddle.ones(weights))
    assert f"choices {choices}, weights {weights}" in str(caught.value)
    numbers = paddle.zeros([3, 1], "int64")
    with pytest.raises(UsageError, match="pass the values of"):
        mixture(paddle.ones([3, 4]), numbers, numbers)
    with pytest.raises(UsageError, match="routed by whole numbers"):
        mixture(paddle.ones([3, 4]), paddle.ones([3, 1]), paddle.ones([3, 1]))


LINEAR = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((LINEAR, "8"), "what builds an expert, and how many"),
        (([LINEAR], 1), "what builds an expert, and how many"),
        ((lambda: None, 2), "a layer of its own"),
        ((lambda: LINEAR, 2), "a layer of its own"),
    ],
)
def test_odd_arguments_of_experts_are_named(arguments: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Experts(*arguments)


WIDTH, EXPERTS, TOP_K, MICRO_BATCHES, ROWS_OF_TOKENS = 8, 4, 2, 3, 2


class Looped(nn.Layer):
    """What a token's experts make of it, in a loop over experts whose sizes the data decide."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS), experts_of(EXPERTS, WIDTH)

    def forward(self, x: Any) -> Any:
        tokens = x.reshape([-1, WIDTH])
        weights, choices = paddle.topk(nn.functional.softmax(self.gate(tokens)), TOP_K)
        total = paddle.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            places = paddle.nonzero(choices == number)
            if places.shape[0]:
                output = expert(paddle.gather(tokens, places[:, 0]))
                share = paddle.gather_nd(weights, places).unsqueeze(-1)
                total = paddle.scatter_nd_add(total, places[:, :1], output * share)
        return x + total.reshape(x.shape)


class Model(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.LayerList([Looped() for _ in range(3)])

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


def batch(seed: int) -> list[Any]:
    paddle.seed(seed)
    return [3 * paddle.randn([MICRO_BATCHES * ROWS_OF_TOKENS, 5, WIDTH]) for _ in range(2)]


def check(pipe: Any) -> None:
    adam = paddle.optimizer.AdamW(0.01, parameters=pipe.parameters())
    session = parity.begin(pipe, fleet.distributed_optimizer(adam))
    for step in range(2):
        session.step(batch(step))
    assert session.report.passed, session.report.verdict()


def test_in_a_list_of_layers() -> None:
    with job(2, MICRO_BATCHES, "ZBH1"):
        check(pipeline([LayerDesc(Looped)] * 3, loss_fn=nn.MSELoss()))


def test_in_a_plain_model() -> None:
    with job(2, MICRO_BATCHES):
        example = paddle.randn([ROWS_OF_TOKENS, 5, WIDTH])
        check(fleet.distributed_model(fleetpipe.pipeline(Model(), example, loss_fn=nn.MSELoss())))


def test_experts_are_the_dense_mixture() -> None:
    """Output and gradients of tokens, gate and experts."""
    paddle.seed(2)
    layer, gate = Experts(lambda: experts_of(1, WIDTH)[0], EXPERTS), nn.Linear(WIDTH, EXPERTS)
    dense = DenseMixture(layer.experts, gate, "naive", TOP_K, 1.0)
    tokens, results = paddle.randn([12, WIDTH]), []
    tokens.stop_gradient = False
    for model in (layer, dense):
        weights, choices = paddle.topk(gate(tokens), TOP_K, sorted=False)
        output = layer(tokens, choices, weights) if model is layer else dense(tokens)
        (output**2).sum().backward()
        results.append([output, *(t.grad.clone() for t in (tokens, *dense.parameters()))])
        tokens.clear_grad()
        dense.clear_gradients()
    for got, expected in zip(*results):
        assert paddle.allclose(got, expected, rtol=1e-4, atol=1e-5)


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
