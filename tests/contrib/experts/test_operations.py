"""Paddle's operations for mixtures of experts, beside loops over tokens and a dense mixture.

In the dense one every expert sees every token, and a weight is 0 or not.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed.models.moe import utils
from paddle.incubate.distributed.models.moe import GShardGate, MoELayer, NaiveGate, SwitchGate
from paddle.nn import functional

from fleetpipe import fleet as fleet  # puts the operations in their place
from fleetpipe.errors import UsageError


def experts_of(count: int, width: int = 8) -> nn.LayerList:
    """Experts of two products each."""
    made = [
        nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))
        for _ in range(count)
    ]
    return nn.LayerList(made)


def room_left(choices: Any, capacity: int) -> Any:
    """The choices with -1 for those that come when ``capacity`` tokens have an expert already."""
    taken: dict[int, int] = {}
    kept = []
    for choice in choices.flatten().tolist():
        taken[choice] = taken.get(choice, 0) + 1
        kept.append(choice if taken[choice] <= capacity else -1)
    return paddle.to_tensor(kept, "int64").reshape(choices.shape)


class DenseMixture(nn.Layer):
    """What ``MoELayer`` with some gate computes, from its parameters; keeps the loss of the gate.

    The gates' own formulas, by their papers: GShard (arXiv:2006.16668), Switch (arXiv:2101.03961).
    """

    def __init__(
        self,
        experts: nn.LayerList,
        gate: nn.Linear,
        kind: str,
        top_k: int,
        capacity: float,
        random_routing: bool = True,
    ) -> None:
        super().__init__()
        self.experts, self.gate, self.kind, self.top_k = experts, gate, kind, top_k
        self.capacity, self.random_routing = capacity, random_routing
        self.loss: Any = None

    def forward(self, x: Any) -> Any:
        tokens = x.reshape([-1, x.shape[-1]])
        values, choices = getattr(self, f"_{self.kind}")(self.gate(tokens))
        weights = sum(
            functional.one_hot(choices[:, k] + 1, len(self.experts) + 1)[:, 1:]
            * values[:, k : k + 1]
            for k in range(self.top_k)
        )
        outputs = paddle.stack([expert(tokens) for expert in self.experts], axis=1)
        return (weights.unsqueeze(-1) * outputs).sum(axis=1).reshape(x.shape)

    def _pruned(self, choices: Any) -> Any:
        return room_left(choices, math.ceil(self.capacity * choices.shape[0]))

    def _naive(self, scores: Any) -> tuple[Any, Any]:
        return tuple(paddle.topk(scores, self.top_k, sorted=False))

    def _gshard(self, scores: Any) -> tuple[Any, Any]:
        values, choices = self._naive(scores)
        tokens, experts = scores.shape
        share = functional.one_hot(choices.flatten(), experts).sum(axis=0) / tokens
        mean = functional.softmax(scores, axis=1).mean(axis=0)
        self.loss = (share * mean).mean() * experts**2
        choices = self._pruned(choices)
        if not self.random_routing:
            return values, choices
        out = 2 * values[:, 1] < paddle.rand([tokens])
        second = paddle.where(out, -paddle.ones([tokens], "int64"), choices[:, 1])
        return values, paddle.stack([choices[:, 0], second], axis=1)

    def _switch(self, scores: Any) -> tuple[Any, Any]:
        if self.training:
            scores = scores + paddle.rand(scores.shape) * 0.2 + 0.9
        probabilities = functional.softmax(scores, axis=-1)
        values, choices = paddle.topk(probabilities, 1)
        experts = scores.shape[1]
        choices = self._pruned(choices)
        kept = choices[choices > -1]
        share = functional.one_hot(kept, experts).sum(axis=0) / kept.shape[0]
        self.loss = (share * probabilities.sum(axis=0) / kept.shape[0]).sum() * experts
        return values, choices


def tensor(values: Any, dtype: str = "int64") -> Any:
    return paddle.to_tensor(np.asarray(values), dtype)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_random_choices(seed: int, dtype: str) -> None:
    draw = np.random.default_rng(seed)
    experts, tokens = int(draw.integers(1, 6)), int(draw.integers(0, 40))
    numbers = draw.integers(-1, experts, (tokens, 2))
    choices = tensor(numbers, dtype)
    counts = [int((numbers == expert).sum()) for expert in range(experts)]
    assert utils._number_count(choices, experts).tolist() == counts

    flat = numbers.flatten()
    by_expert = [np.flatnonzero(flat == expert)[::-1] for expert in range(experts)]
    places = utils._assign_pos(choices, tensor(np.cumsum(counts)))
    assert places.tolist() == np.concatenate(by_expert).tolist()

    capacity = int(draw.integers(1, 10))
    pruned = utils._prune_gate_by_capacity(choices, tensor([capacity] * experts), experts, 1)
    expected = room_left(choices, capacity) if tokens else choices
    assert pruned.dtype == choices.dtype
    assert pruned.tolist() == expected.tolist()


def test_room_is_filled_member_by_member_and_bad_choices_are_refused() -> None:
    limited = utils._limit_by_capacity(tensor([1, 2, 2, 8, 3, 6]), tensor([5, 5, 5]), 2)
    assert limited.tolist() == [1, 2, 2, 4, 3, 3]
    with pytest.raises(UsageError, match=r"routed by whole numbers.*\n.*int64.*\n.*float32"):
        utils._number_count(tensor([0.0], "float32"), 2)
    with pytest.raises(UsageError, match="from 0 to 1, or -1"):
        utils._number_count(tensor([0, 2]), 2)
    with pytest.raises(UsageError, match="drops every token"):
        utils._limit_by_capacity(tensor([3, 0]), tensor([0, 0]), 1)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("capacity", [0.2, 1.0])
@pytest.mark.parametrize(
    ("kind", "top_k"), [("naive", 1), ("naive", 2), ("gshard", 2), ("switch", 1)]
)
def test_moe_layer_is_the_dense_mixture(
    kind: str, top_k: int, capacity: float, training: bool
) -> None:
    compare(kind, top_k, experts=3, tokens=12, capacity=capacity, seed=4, training=training)


def compare(
    kind: str, top_k: int, experts: int, tokens: int, capacity: float, seed: int, training: bool
) -> None:
    """Compares output, loss of the gate and gradients with the dense mixture's."""
    paddle.seed(seed)
    options = {} if kind == "naive" else {"capacity": (capacity, capacity)}
    gates = {"naive": NaiveGate, "gshard": GShardGate, "switch": SwitchGate}
    gate = gates[kind](8, experts, 1, topk=top_k, **options)
    layer = MoELayer(8, experts_of(experts), gate)
    dense = DenseMixture(layer.experts, layer.gate.gate, kind, top_k, capacity)
    # A gate that is far from even: the capacity drops some.
    gate.gate.bias.set_value(paddle.linspace(0, 3, experts))
    x = paddle.randn([2, tokens // 2, 8])
    results = []
    for model in (layer, dense):
        model.train() if training else model.eval()
        paddle.seed(seed)
        inputs = x.clone()
        inputs.stop_gradient = False
        output = model(inputs * 1)
        loss = gate.get_loss() if model is layer else model.loss
        total = (output**2).sum() + (0 if loss is None else loss)
        total.backward()
        tensors = (inputs, *layer.parameters())
        # An expert without tokens has no gradient in the one, and zeros in the other.
        grads = [paddle.zeros_like(t) if t.grad is None else t.grad for t in tensors]
        results.append([output, total, *(grad.clone() for grad in grads)])
        layer.clear_gradients()
    for got, expected in zip(*results):
        most = max(1.0, float(expected.abs().max()))
        np.testing.assert_allclose(got.numpy(), expected.numpy(), rtol=1e-4, atol=1e-5 * most)
