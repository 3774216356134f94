"""What a profile counts of experts and of attention."""

from __future__ import annotations

from typing import Any

import paddle
from paddle import nn

from fleetpipe.contrib.experts import Experts
from fleetpipe.dygraph import sequences
from fleetpipe.fleet.meta_parallel import LayerDesc
from fleetpipe.paddle_api.layer import MoELayer
from fleetpipe.profiling import LayerDegrees
from tests.pipelines import ROWS, job, pipeline


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
