"""Modes of layers: any order of a script's calls and of batches, beside plain Paddle by hand."""

from __future__ import annotations

import random
from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe.fleet.meta_parallel import LayerDesc
from tests.pipelines import batch, model_in_job, sgd

LAYERS = [
    *(LayerDesc(nn.Linear, 6, 8), LayerDesc(nn.BatchNorm1D, 8), LayerDesc(nn.Linear, 8, 8)),
    *(LayerDesc(nn.BatchNorm1D, 8), LayerDesc(nn.Linear, 8, 4)),
]
X, Y = batch(2)
CALLS = ["train", "eval", "norm.train", "norm.eval", "train_batch", "eval_batch", "predict_batch"]


class ByHand:
    """The same list of layers in plain Paddle, whose script sets each layer's mode by itself."""

    def __init__(self, pipe: Any) -> None:
        self.net = pipe.single_model()
        pipe.copy_to(self.net)
        self.norms = [part for part in self.net.sublayers() if isinstance(part, nn.BatchNorm1D)]
        self.evaluates = False
        #: Of each norm: its mode in training, in evaluation, and in the last evaluation.
        self.trains, self.switched, self.seen = [True, True], [False, False], [False, False]
        self.optimizer = paddle.optimizer.SGD(0.1, parameters=self.net.parameters())

    def call(self, name: str, number: int) -> None:
        if name == "norm.train":
            (self.switched if self.evaluates else self.trains)[number] = True
        elif name == "norm.eval":
            if not self.seen[number]:
                self.trains[number] = False
            self.switched[number] = self.seen[number] = False
        elif name.startswith("train"):
            self.trains = [name == "train" or any(two) for two in zip(self.trains, self.switched)]
            self.enter(evaluates=False)
        elif name == "eval" or not self.evaluates:
            self.trains = [any(two) for two in zip(self.trains, self.switched)]
            self.enter(evaluates=True)
        if name.endswith("batch"):
            self.seen = [*self.switched]
            self.run(trains=name == "train_batch")

    def enter(self, evaluates: bool) -> None:
        self.evaluates, self.switched, self.seen = evaluates, [False, False], [False, False]

    def run(self, trains: bool) -> None:
        self.net.eval() if self.evaluates else self.net.train()
        for norm, mode in zip(self.norms, self.switched if self.evaluates else self.trains):
            norm.training = mode
        for rows in (slice(0, 2), slice(2, 4)):
            with paddle.set_grad_enabled(trains):
                loss = nn.functional.cross_entropy(self.net(X[rows]), Y[rows]) / 2
            if trains:
                loss.backward()
        if trains:
            self.optimizer.step()
            self.optimizer.clear_grad()


def state(layers: list[Any]) -> list[bytes]:
    return [tensor.numpy().tobytes() for norm in layers for tensor in norm.state_dict().values()]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_modes_that_the_script_has_set_count(ranks: int, seed: int) -> None:
    draw = random.Random(seed)
    with model_in_job(ranks, 2, layers=LAYERS, loss_fn=nn.CrossEntropyLoss()) as model:
        pipe, optimizer = model.layers, sgd(model)
        plain = ByHand(pipe)
        norms = [part for part in pipe.sublayers() if isinstance(part, nn.BatchNorm1D)]
        calls: list[str] = []
        for _ in range(40):
            call, number = draw.choice(CALLS), draw.randrange(2)
            calls.append(call)
            if call == "train_batch":
                model.train_batch([X, Y], optimizer)
            elif call == "eval_batch":
                model.eval_batch([X, Y], compute_loss=True)
            elif call == "predict_batch":
                model.predict_batch(X)
            elif call in ("train", "eval"):
                getattr(draw.choice([model, pipe]), call)()
            else:
                getattr(norms[number], call.removeprefix("norm."))()
            plain.call(call, number)
            assert state(norms) == state(plain.norms), calls
