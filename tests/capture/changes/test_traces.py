"""No call that takes a model leaves a trace in it, nor in the random states."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import fleet, parity
from fleetpipe.capture.running.dependencies import attributes_of, tensors_of
from fleetpipe.dygraph.backward.adding import is_watched
from fleetpipe.fleet.meta_parallel import PipelineLayer
from tests.jobs import job
from tests.pipelines import sgd


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


def digest(model: Any) -> dict[str, Any]:
    """All that there is in a model, and what would be drawn next."""
    tensors = {name: one.value for name, one in tensors_of(model).items()}
    state = paddle.get_rng_state()
    drawn = paddle.rand([2]).tolist()
    paddle.set_rng_state(state)
    numbers = map(np.asarray, np.random.get_state())
    return {
        "attributes and hooks": attributes_of(model, lambda *_: True),
        "modes": {layer: layer.training for layer in model.sublayers(include_self=True)},
        "tensors": {n: (id(t), t.numpy().tobytes(), t.stop_gradient) for n, t in tensors.items()},
        "gradients": {
            n: None if t.grad is None else t.grad.numpy().tobytes() for n, t in tensors.items()
        },
        "tensor attributes": {n: {**vars(t)} for n, t in tensors.items() if hasattr(t, "__dict__")},
        "gradient hooks": {n: is_watched(t) for n, t in tensors.items()},
        "random numbers": (drawn, random.getstate(), [part.tobytes() for part in numbers]),
    }


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
    example = paddle.randn([4, 8])
    before = digest(model)
    CALLS[name](model, example)
    assert digest(model) == before


class Made:
    """A wrapped model that has trained a batch, and what calls take beside it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.model, self.folder = Model(), folder
        self.data = [paddle.randn([4, 8]), paddle.randn([4, 4])]
        self.rows = paddle.io.TensorDataset(self.data)
        parts = self.model.one, nn.functional.tanh, self.model.two, self.model.drop, self.model.last
        self.pipe: Any = (
            fleetpipe.pipeline(self.model, self.data[0][:2], nn.MSELoss(), ["last"])
            if kind == "captured"
            else PipelineLayer([*parts], num_stages=2, loss_fn=nn.MSELoss())
        )
        self.fit = fleetpipe.Model(self.pipe)
        self.fit.prepare(None, nn.MSELoss())
        self.wrapped = fleet.distributed_model(self.pipe)
        self.optimizer = sgd(self.wrapped)
        self.wrapped.train_batch(self.data, self.optimizer)
        self.single = self.pipe.single_model()

    def digests(self) -> list[dict[str, Any]]:
        return [digest(self.model), digest(self.single)]

    def save(self) -> None:
        manager = fleetpipe.CheckpointManager(self.folder)
        manager.save(1, model=self.wrapped, optimizer=self.optimizer)


#: What runs the model for its results: they count as calls, and a number is drawn for their keys.
EVALUATIONS: dict[str, Callable[[Made], object]] = {
    "eval_batch": lambda made: made.wrapped.eval_batch(made.data),
    "predict_batch": lambda made: made.wrapped.predict_batch(made.data[0]),
    "Model.evaluate": lambda made: made.fit.evaluate(made.rows, 4, verbose=0),
    "Model.predict": lambda made: made.fit.predict(made.rows, 4, verbose=0),
}
OTHERS: dict[str, Callable[[Made], object]] = {
    "Model.summary": lambda made: made.fit.summary(batch=made.data),
    "Model.save": lambda made: made.fit.save(str(made.folder / "model")),
    "plan": lambda made: fleetpipe.plan(made.wrapped.profile(made.data), 2, 2),
    "parity": lambda made: parity.begin(made.wrapped, made.optimizer),
    "CheckpointManager": Made.save,
    "save_state_dict": lambda made: made.pipe.save_state_dict(made.folder),
    "full_state_dict": lambda made: made.pipe.full_state_dict(),
    "single_model": lambda made: made.pipe.single_model(),
    "load_from": lambda made: made.pipe.load_from(made.single),
}


@pytest.mark.parametrize("kind", ["list", "captured"])
@pytest.mark.parametrize("name", [*EVALUATIONS, *OTHERS])
def test_a_call_leaves_the_model_of_a_job_as_it_was(name: str, kind: str, tmp_path: Path) -> None:
    with job(2, 2):
        made = Made(kind, tmp_path)
        if name in EVALUATIONS:
            EVALUATIONS[name](made)  # it leaves the mode of an evaluation, as Paddle does
            calls, state = made.model.one.calls[0], paddle.get_rng_state()
        before = made.digests()
        {**EVALUATIONS, **OTHERS}[name](made)
        if name in EVALUATIONS:
            made.model.one.calls[0] = made.model.two.calls[0] = calls
            paddle.set_rng_state(state)
        assert made.digests() == before


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
