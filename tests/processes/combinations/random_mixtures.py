"""Random mixtures of experts, beside a dense mixture of plain Paddle.

python -m tests.processes.combinations.random_mixtures FIRST COUNT
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.incubate.distributed.models.moe import GShardGate, MoELayer, NaiveGate, SwitchGate
from paddle.nn import functional

from fleetpipe import fleet
from fleetpipe.contrib.experts import AuxiliaryLoss, Experts
from fleetpipe.fleet.meta_parallel import LayerDesc, SharedLayerDesc
from tests.processes.combinations.beside_plain import Case, main, micro_batches

WEIGHT, Z_WEIGHT = 0.1, 0.01
#: By schedule, the chunks of a rank.
SCHEDULES = {
    **dict.fromkeys(("1F1B", "FThenB", "ZBH1", "Eager1F1B"), 1),
    **dict.fromkeys(("ZBV", "VHalf", "Interleaved1F1B", "DualPipeV"), 2),
}
LAYOUTS: list[dict[str, int]] = [
    *({"pp": 2},) * 3,
    {"pp": 3},
    {"pp": 1, "dp": 2, "ep": 2},
    {"pp": 1, "sharding": 2, "ep": 2},
    {"pp": 1, "dp": 4, "ep": 4},
    {"pp": 1, "dp": 2, "sharding": 2, "ep": 2},
    {"pp": 1, "dp": 2, "sharding": 2, "ep": 4},
    *({"pp": 2, "dp": 2, "ep": 2},) * 2,
    *({"pp": 2, "sharding": 2, "ep": 2},) * 2,
    {"pp": 2, "dp": 2},
    {"pp": 2, "mp": 2, "ep": 2},
]


class Expert(nn.Sequential):
    """Two products."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, width + 3), nn.Tanh(), nn.Linear(width + 3, width))


def plain_expert(weights: Mapping[str, Any], path: str, x: Any) -> Any:
    up, down = ([weights[f"{path}.{n}.{part}"] for part in ("weight", "bias")] for n in (0, 2))
    return paddle.matmul(paddle.tanh(paddle.matmul(x, up[0]) + up[1]), down[0]) + down[1]


def losses_of(layer: Any) -> Any:
    """What gates of Paddle's have left, and routers here: a balance loss and a z-loss."""
    if isinstance(layer, NaiveGate):
        return layer.get_loss()
    if isinstance(layer, Routed) and layer.l_aux is not None:
        loss, layer.l_aux = layer.l_aux + Z_WEIGHT * layer.l_zloss, None
        return loss
    return None


class Stock(nn.Layer):
    """Paddle's layer."""

    def __init__(self, case: RandomCase) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(case.width)
        here, hcg = case.experts // case.ep, fleet.get_hybrid_communicate_group()
        group = hcg.get_expert_parallel_group() if case.ep > 1 else None
        # Each member along mp has a part of the tokens, or all of them.
        parts = case.gate == "naive" and case.rows * case.length % case.degrees.get("mp", 1) == 0
        mp_group = hcg.get_model_parallel_group() if parts else None
        sizes, options = (
            (case.width, here, case.ep),
            {"capacity": (case.capacity,) * 2, "group": group},
        )
        gate = {
            "naive": lambda: NaiveGate(*sizes, case.top_k),
            "gshard": lambda: GShardGate(*sizes, 2, random_routing=False, **options),
            "switch": lambda: SwitchGate(*sizes, 1, switch_eps=0.0, **options),
        }[case.gate]()
        experts = nn.LayerList([Expert(case.width) for _ in range(here)])
        self.moe = MoELayer(case.width, experts, gate, group, mp_group)

    def forward(self, x: Any) -> Any:
        return x + self.moe(self.norm(x))


class Routed(nn.Layer):
    """A router that leaves two losses; its experts are a plain list, or spread over ranks."""

    def __init__(self, case: RandomCase, spread: bool) -> None:
        super().__init__()
        self.case, self.spread = case, spread
        self.norm, self.gate = nn.LayerNorm(case.width), nn.Linear(case.width, case.experts)
        make = lambda: Expert(case.width)  # noqa: E731
        if spread:
            self.mixture = Experts(make, case.experts)
        else:
            self.mixture = nn.Layer()
            self.mixture.experts = nn.LayerList([make() for _ in range(case.experts)])
        self.l_aux: Any = None
        self.l_zloss: Any = None

    def forward(self, x: Any) -> Any:
        tokens = self.norm(x).reshape([-1, self.case.width])
        scores, self.l_aux, self.l_zloss = routed(self.gate(tokens), self.case.closed)
        weights, choices = paddle.topk(scores, self.case.top_k)
        if self.spread:
            return x + self.mixture(tokens, choices, weights).reshape(x.shape)
        output = paddle.zeros_like(tokens)
        for number, one in enumerate(self.mixture.experts):
            places, slots = (choices == number).nonzero(as_tuple=True)
            if places.size:
                places, slots = places.flatten(), slots.flatten()
                part = one(tokens.index_select(places)) * weights[places, slots].unsqueeze(-1)
                output = output.index_add(places, 0, part)
        return x + output.reshape(x.shape)


def routed(logits: Any, closed: int) -> tuple[Any, Any, Any]:
    """Shares of experts, the last ``closed`` of which get no token; a balance loss, a z-loss."""
    experts = logits.shape[-1]
    shut = paddle.to_tensor([0.0] * (experts - closed) + [-1e4] * closed, logits.dtype)
    scores = functional.softmax(logits + shut)
    return scores, (scores.mean(0) ** 2).sum() * experts, (paddle.logsumexp(logits, -1) ** 2).mean()


def head(first: Any, x: Any) -> Any:
    return paddle.matmul(x, first.weight, transpose_y=True)


class RandomCase(Case):
    """A model of mixtures and what lies between, by number."""

    def __init__(self, number: int) -> None:
        draw = random.Random(number)
        self.number, self.degrees = number, {"dp": 1, **LAYOUTS[number % len(LAYOUTS)]}
        names = list(SCHEDULES)
        self.schedule = names[number // 3 % len(names)] if self.degrees["pp"] > 1 else "1F1B"
        self.ep = self.degrees.get("ep", 1)
        self.experts = self.ep * draw.choice([n for n in (1, 2, 3, 4, 8) if 2 <= n * self.ep <= 16])
        self.micro_batches, self.rows = draw.choice([1, 2, 3, 4, 8]), draw.choice([1, 2, 3])
        self.width, self.length = draw.choice([4, 6, 8]), draw.choice([1, 3, 6])
        self.stock = draw.random() < 0.5
        self.gate = draw.choice(["naive", "gshard", "switch"])
        self.capacity = draw.choice([0.2, 0.5, 1.2, 100.0])
        if self.degrees.get("mp", 1) > 1:
            self.capacity = 100.0  # two members' same tokens take room from each other
        elif self.gate == "switch" and self.ep > 1:
            self.capacity = max(self.capacity, self.ep - 0.9)  # without any token its loss is NaN
        self.top_k = min(draw.choice([1, 2, 3, 4]), self.experts)
        if self.stock and self.gate != "naive":
            self.top_k = {"gshard": 2, "switch": 1}[self.gate]
        self.closed = min(draw.choice([0, 0, 1, 3]), self.experts - self.top_k)
        self.dtype = (
            "float32"
            if self.stock and self.gate != "naive"
            else draw.choice(["float64", "float64", "float32"])
        )
        kinds = ["stock"] if self.stock else ["spread"]
        kinds += ["list"] if self.ep == 1 else []
        self.kinds = [draw.choice([*kinds, "dense"]) for _ in range(draw.choice([4, 5, 7]))]
        self.kinds[draw.randrange(4)] = kinds[0]
        self.tied = draw.random() < 0.4
        self.optimizer = draw.choice(["sgd", "momentum", "adam", "adamw", "adagrad"])
        self.clip = draw.choice([None, 0.1, 1.0])
        self.options = {}
        self.layout = {"num_virtual_pipeline_stages": SCHEDULES[self.schedule]}
        if draw.random() < 0.3:
            self.layout |= {"recompute_interval": draw.choice([1, 2]), "recompute_ctx": {}}
        self.loss_fn = AuxiliaryLoss(nn.MSELoss(), WEIGHT, losses_of)

    def entries(self) -> list[Any]:
        made = {
            "stock": lambda: LayerDesc(Stock, self),
            "list": lambda: LayerDesc(Routed, self, False),
            "spread": lambda: LayerDesc(Routed, self, True),
            "dense": lambda: LayerDesc(Expert, self.width),
        }
        sizes = {"in_features": self.width, "out_features": self.width}
        ends: list[Any] = [LayerDesc(nn.Linear, **sizes), LayerDesc(nn.Linear, **sizes)]
        if self.tied:
            ends = [
                SharedLayerDesc("ends", nn.Linear, **sizes),
                SharedLayerDesc("ends", nn.Linear, head, **sizes),
            ]
        return [ends[0], *(made[kind]() for kind in self.kinds), ends[1]]

    def batch(self, step: int) -> list[Any]:
        numbers = np.random.default_rng([self.number, step])
        rows = self.replicas * self.micro_batches * self.rows
        values = numbers.standard_normal((2, rows, self.length, self.width)).astype(self.dtype)
        return [paddle.to_tensor(value) for value in values]

    def plain_loss(self, weights: Mapping[str, Any], batch: list[Any]) -> Any:
        """The mean over micro-batches; members along ep share an expert's capacity."""
        inputs, labels = (micro_batches(self, value) for value in batch)
        total = 0.0
        for k in range(self.micro_batches):
            values = inputs[k :: self.micro_batches]
            auxiliary = [0.0] * len(values)
            for number, kind in enumerate(["linear", *self.kinds, "linear"]):
                path = f"{number}"
                if kind == "linear":
                    path = "shared_layers.ends" if self.tied else path
                    w, b = weights[f"{path}.weight"], weights[f"{path}.bias"]
                    last = number > 0 and self.tied
                    values = [
                        paddle.matmul(x, w.t()) if last else paddle.matmul(x, w) + b for x in values
                    ]
                elif kind == "dense":
                    values = [plain_expert(weights, path, x) for x in values]
                else:
                    values, losses = self._mixed(weights, path, values, kind == "stock")
                    auxiliary = [a + b for a, b in zip(auxiliary, losses)]
            for x, loss, label in zip(values, auxiliary, labels[k :: self.micro_batches]):
                total = total + ((x - label) ** 2).mean() + WEIGHT * loss
        return total / (self.micro_batches * self.replicas)

    def _mixed(
        self, weights: Mapping[str, Any], path: str, values: list[Any], stock: bool
    ) -> tuple[list[Any], list[Any]]:
        norm = weights[f"{path}.norm.weight"], weights[f"{path}.norm.bias"]
        gate = f"{path}.moe.gate.gate" if stock else f"{path}.gate"
        listed = f"{path}.moe.experts" if stock else f"{path}.mixture.experts"
        outputs: list[Any] = []
        losses: list[Any] = []
        for member, x in enumerate(values):
            if member % self.ep == 0:
                taken = [0] * self.experts
            tokens = functional.layer_norm(x, x.shape[-1:], *norm).reshape([-1, self.width])
            logits = paddle.matmul(tokens, weights[f"{gate}.weight"]) + weights[f"{gate}.bias"]
            shares, loss = self._stock_shares(logits, taken) if stock else self._shares(logits)
            every = [plain_expert(weights, f"{listed}.{n}", tokens) for n in range(self.experts)]
            mixed = (paddle.stack(every, 1) * shares.unsqueeze(-1)).sum(1)
            outputs.append(x + mixed.reshape(x.shape))
            losses.append(loss)
        return outputs, losses

    def _shares(self, logits: Any) -> tuple[Any, Any]:
        scores, balance, z = routed(logits, self.closed)
        _, choices = paddle.topk(scores, self.top_k)
        return scores * functional.one_hot(choices, self.experts).sum(1), balance + Z_WEIGHT * z

    def _stock_shares(self, logits: Any, taken: list[int]) -> tuple[Any, Any]:
        """Shares by the gates' formulas; an expert's room goes to tokens in their order."""
        tokens = logits.shape[0]
        scores = functional.softmax(logits) if self.gate == "switch" else logits
        _, choices = paddle.topk(scores, self.top_k)
        chosen = functional.one_hot(choices, self.experts).sum(1).numpy()
        kept, room = chosen.copy(), math.ceil(self.capacity * tokens)
        for token in range(tokens if self.gate != "naive" else 0):
            for n in np.flatnonzero(chosen[token]):
                kept[token, n] = taken[n] < room
                taken[n] += 1
        loss: Any = 0.0
        if self.gate == "gshard":
            share = paddle.to_tensor(chosen.sum(0) / tokens)
            loss = (share * functional.softmax(logits).mean(0)).mean() * (
                self.experts // self.ep
            ) ** 2
        if self.gate == "switch":
            count = float(kept.sum())
            share = paddle.to_tensor(kept.sum(0) / count)
            loss = (share * scores.sum(0) / count).sum() * self.experts
        return scores * paddle.to_tensor(kept), loss


if __name__ == "__main__":
    main("tests.processes.combinations.random_mixtures")
