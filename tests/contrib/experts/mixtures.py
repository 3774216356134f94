"""Mixtures of experts in plain Paddle: every expert sees every token, and a weight is 0 or not."""

from __future__ import annotations

import math
from typing import Any

import paddle
from paddle import nn
from paddle.nn import functional


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
