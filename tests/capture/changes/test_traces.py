"""No call that takes a plain model leaves a trace in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import fleet
from fleetpipe.capture.running.dependencies import attributes_of, tensors_of
from tests.jobs import job


class Adapted(nn.Layer):  # type: ignore[misc]
    """A Linear that merges its adapter into its weight in evaluation, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(2, 8)
        self.base.weight.stop_gradient = True
        self.norm = nn.BatchNorm1D(8)
        self.merged, self.calls = False, [0]

    def _merge(self, sign: float) -> None:
        with paddle.no_grad():
            product = self.down.weight @ self.up.weight
            self.base.weight.set_value(self.base.weight + sign * product)
        self.merged = sign > 0

    def train(self) -> Any:
        super().train()
        if self.merged:
            self._merge(-1.0)
        return self

    def eval(self) -> Any:
        super().eval()
        if not self.merged:
            self._merge(1.0)
        return self

    def forward(self, x: Any) -> Any:
        self.calls[0] += 1
        y = self.base(x) if self.merged else self.base(x) + x @ self.down.weight @ self.up.weight
        return self.norm(y)


class Model(nn.Layer):  # type: ignore[misc]
    """Switches its adapters itself, as Paddle's ``train`` and ``eval`` set modes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = Adapted(), Adapted(), nn.Linear(8, 4)
        self.drop = nn.Dropout(0.3)

    def train(self) -> Any:
        super().train()
        return [layer.train() for layer in (self.one, self.two)] and self

    def eval(self) -> Any:
        super().eval()
        return [layer.eval() for layer in (self.one, self.two)] and self

    def forward(self, x: Any) -> Any:
        return self.last(self.drop(self.two(self.one(x).tanh())))


def digest(model: Any) -> Any:
    """All that there is in a model."""
    tensors = {name: one.value for name, one in tensors_of(model).items()}
    return (
        attributes_of(model, lambda *_: True),
        {layer: layer.training for layer in model.sublayers(include_self=True)},
        {name: (id(t), t.numpy().tobytes(), t.stop_gradient) for name, t in tensors.items()},
        {name: None if t.grad is None else t.grad.numpy().tobytes() for name, t in tensors.items()},
        paddle.get_rng_state()[0].current_seed(),
    )


def _pipeline(model: Any, example: Any, **options: Any) -> None:
    fleetpipe.pipeline(model, example, split_spec=["two"], num_stages=2, **options)


CALLS: dict[str, Callable[[Any, Any], object]] = {
    "explain": fleetpipe.explain,
    "explain, measured": lambda model, example: fleetpipe.explain(model, example, measure=True),
    "pipeline, unproved": lambda model, example: _pipeline(model, example, verify=False),
    "pipeline": _pipeline,
    "pipeline, auto": lambda model, example: fleetpipe.pipeline(model, example, num_stages=2),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_leaves_the_model_as_it_was(name: str, training: bool) -> None:
    model = Model()
    model.train() if training else model.eval()
    before = digest(model)
    CALLS[name](model, paddle.randn([4, 8]))
    for one, other in zip(digest(model), before):
        assert one == other


def test_adapters_that_merge_in_evaluation_train_as_in_the_plain_model() -> None:
    with job(2, 2):
        model, plain = Model(), Model()
        plain.set_state_dict(model.state_dict())
        for one in (model, plain):
            one.drop.p = 0.0
        x, y = paddle.randn([4, 8]), paddle.randn([4, 4])
        pipe = fleetpipe.pipeline(model, x[:2], nn.MSELoss(), ["two"])
        wrapped = fleet.distributed_model(pipe)
        ours, theirs = (
            paddle.optimizer.SGD(0.1, parameters=one.parameters()) for one in (pipe, plain)
        )
        ours = fleet.distributed_optimizer(ours)
        for _ in range(3):
            wrapped.train_batch([x, y], ours)
            predicted = wrapped.predict_batch(x[:2])
            plain.train()
            for inputs, labels in zip(x.split(2), y.split(2)):
                (nn.functional.mse_loss(plain(inputs), labels) / 2).backward()
            theirs.step()
            theirs.clear_grad()
            plain.eval()
            assert (predicted.numpy() == plain(x[:2]).numpy()).all()
        state = model.state_dict()
        assert all((state[n].numpy() == t.numpy()).all() for n, t in plain.state_dict().items())
