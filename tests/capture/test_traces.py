"""No call that takes a model leaves a trace in it, and a proof varies what a model may take."""

from __future__ import annotations

import copy
import pickle
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
from fleetpipe.capture import repeatability
from fleetpipe.capture.running.variants import mark_attributes, tensor_references
from fleetpipe.dygraph.backward.added_gradients import is_watched
from fleetpipe.errors import StateError
from fleetpipe.fleet.meta_parallel import PipelineLayer
from tests.capture.models import require_bits
from tests.pipelines import job, sgd


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
    tensors = {name: one.value for name, one in tensor_references(model).items()}
    state = paddle.get_rng_state()
    drawn = paddle.rand([2]).tolist()
    paddle.set_rng_state(state)
    numbers = map(np.asarray, np.random.get_state())
    return {
        "attributes and hooks": mark_attributes(model, lambda *_: True),
        "modes": {layer: layer.training for layer in model.sublayers(include_self=True)},
        "tensors": {n: (id(t), t.numpy().tobytes(), t.stop_gradient) for n, t in tensors.items()},
        "gradients": {
            n: None if t.grad is None else t.grad.numpy().tobytes() for n, t in tensors.items()
        },
        "tensor attributes": {n: {**vars(t)} for n, t in tensors.items() if hasattr(t, "__dict__")},
        "gradient hooks": {n: is_watched(t) for n, t in tensors.items()},
        "random numbers": (drawn, random.getstate(), [part.tobytes() for part in numbers]),
    }


@pytest.mark.parametrize("training", [True, False])
def test_a_call_leaves_the_model_as_it_was(training: bool) -> None:
    model = Model()
    model.train() if training else model.eval()
    example = paddle.randn([4, 8])
    before = digest(model)
    fleetpipe.explain(model, example, measure=True)
    assert digest(model) == before
    fleetpipe.pipeline(model, example, num_stages=2)
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
    "CheckpointManager": Made.save,
    "save_state_dict": lambda made: made.pipe.save_state_dict(made.folder),
    "full_state_dict": lambda made: made.pipe.full_state_dict(),
    "single_model": lambda made: made.pipe.single_model(),
    "load_from": lambda made: made.pipe.load_from(made.single),
    "parity": lambda made: parity.begin(made.wrapped, made.optimizer),
}


@pytest.mark.parametrize("kind", ["list", "captured"])
def test_a_call_leaves_the_model_of_a_job_as_it_was(kind: str, tmp_path: Path) -> None:
    with job(2, 2):
        made = Made(kind, tmp_path)
        for name, call in EVALUATIONS.items():
            call(made)  # it leaves the mode of an evaluation, as Paddle does
            calls, state, before = made.model.one.calls[0], paddle.get_rng_state(), made.digests()
            call(made)
            made.model.one.calls[0] = made.model.two.calls[0] = calls
            paddle.set_rng_state(state)
            assert made.digests() == before, name
        made.wrapped.train_batch(made.data, made.optimizer)
        made.single = made.pipe.single_model()
        for name, call in OTHERS.items():
            before = made.digests()
            call(made)
            assert made.digests() == before, name


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


ALL = repeatability.ALL
BOXES = np.array([[[0, 0, 16, 16], [4, 4, 30, 30]], [[8, 2, 20, 31], [1, 5, 2, 7]]], "float32")
SHARES = np.array([[0.25, 0.75], [0.5, 0.5]], "float32")


@pytest.mark.parametrize("variation", ALL)
def test_boxes_stay_boxes(variation: repeatability.Variation) -> None:
    for boxes in (BOXES, BOXES - 9):
        got = repeatability.vary_numbers(boxes, variation, 2)
        assert (got[..., :2] <= got[..., 2:]).all()
        assert np.abs(got).max() <= np.abs(boxes).max()


@pytest.mark.parametrize("variation", ALL)
def test_offsets_edges_sizes_rows_and_shares_stay(variation: repeatability.Variation) -> None:
    offsets, edges = [0, 3, 3, 7], [[0, 1, 2], [2, 0, 1]]
    for value, rows in ((offsets, 4), ([9, 5], 2), (edges, 3), (5, 2)):
        numbers = np.array(value)
        assert (repeatability.vary_numbers(numbers, variation, rows) == numbers).all()
    numbers = np.array([[7, 1], [2, 9], [3, 3]])
    got = repeatability.vary_numbers(numbers, variation, 3)
    assert {*map(tuple, got)} <= {*map(tuple, numbers)}
    shares = repeatability.vary_numbers(SHARES, variation, 2)
    assert np.allclose(shares.sum(1), variation.scale or 1.0)
    infinite = repeatability.vary_numbers(np.array([[-np.inf, 1.0], [-np.inf, -1.0]]), variation, 2)
    assert not np.isnan(infinite).any()


class Heads(nn.Layer):  # type: ignore[misc]
    """The second stage of a detector, whose regions end the process if a box ends too early."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2D(3, 4, 3, 2, 1), nn.Linear(16, 10)

    def forward(self, image: Any, boxes: Any) -> Any:
        count = paddle.full([image.shape[0]], boxes.shape[1], "int32")
        features = nn.functional.relu(self.conv(image))
        regions = paddle.vision.ops.roi_align(features, boxes.reshape([-1, 4]), count, 2, 0.5)
        return self.fc(regions.flatten(1)).reshape([-1, boxes.shape[1], 10]).mean(1)


def test_a_model_that_takes_boxes() -> None:
    images, boxes = paddle.randn([8, 3, 32, 32]), paddle.to_tensor(np.tile(BOXES, (4, 1, 1)))
    data = [(images, boxes), paddle.randint(0, 10, [8, 1])]
    require_bits(Heads, data, ["fc"], verify="first")


class Rotary(nn.Layer):  # type: ignore[misc]
    """A table that a longer input makes longer."""

    def __init__(self) -> None:
        super().__init__()
        self.grow(2)

    def grow(self, length: int) -> None:
        self.length, self.table = length, paddle.arange(1.0, length + 1).cos().unsqueeze(1)

    def forward(self, x: Any) -> Any:
        if x.shape[1] > self.length:
            self.grow(x.shape[1])
        return self.table[: x.shape[1]]


class Turned(nn.Layer):  # type: ignore[misc]
    """Turns by such a table."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.rotary, self.b = nn.Linear(4, 4), Rotary(), nn.Linear(4, 10)

    def forward(self, x: Any) -> Any:
        h = self.a(x)
        return self.b(h * self.rotary(h)).mean(1)


def test_a_table_that_grows_in_a_sublayer() -> None:
    data = [paddle.randn([8, 5, 4]), paddle.randint(0, 10, [8, 1])]
    require_bits(Turned, data, ["b"], verify="first")


def test_a_captured_pipeline_says_what_to_copy_instead(tmp_path: Path) -> None:
    with job(2):
        net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        pipe = fleetpipe.pipeline(net, paddle.randn([2, 6]), split_spec=["2"], verify=False)
        for copied in (copy.deepcopy, copy.copy, pickle.dumps):
            with pytest.raises(StateError, match=r"is not (copied|pickled)"):
                copied(pipe)
        single = pipe.single_model()
        x = paddle.randn([3, 6])
        paddle.jit.save(single, str(tmp_path / "net"), [paddle.static.InputSpec([None, 6])])
        loaded = paddle.jit.load(str(tmp_path / "net"))(x)
        assert np.allclose(loaded.numpy(), single(x).numpy(), atol=1e-6)
