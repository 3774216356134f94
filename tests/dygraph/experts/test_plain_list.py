"""A list of experts as libraries write it: a loop, each expert on the tokens that chose it."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import nn

import fleetpipe
from fleetpipe import fleet, parity
from fleetpipe.dygraph.experts import Experts
from fleetpipe.fleet.meta_parallel import LayerDesc
from tests.dygraph.experts.mixtures import DenseMixture, experts_of
from tests.pipelines import job, pipeline

WIDTH, EXPERTS, TOP_K, MICRO_BATCHES, ROWS = 8, 4, 2, 3, 2


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
    return [3 * paddle.randn([MICRO_BATCHES * ROWS, 5, WIDTH]) for _ in range(2)]


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
        example = paddle.randn([ROWS, 5, WIDTH])
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
