"""Hooks, gradients switched off, and modes of their own, in a plain model that is captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import fleet
from fleetpipe.errors import CaptureError
from tests.capture.models import require_bits, trained
from tests.dygraph.train.test_idioms import HOOKS, STOPS, hook, layers_of, linear
from tests.pipelines import CLASSES, FEATURES, accumulate, batch, bits, job, sgd

IDIOMS = {**HOOKS, **STOPS}


@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
@pytest.mark.parametrize("idiom", IDIOMS)
def test_what_is_done_around_layers_has_the_bits_of_the_plain_model(
    idiom: str, schedule: str
) -> None:
    model = lambda: nn.Sequential(*layers_of(IDIOMS[idiom]))  # noqa: E731
    require_bits(model, batch(3), ["2"], schedule, micro_batches=3)


class Chain(nn.Layer):
    """A value that layers of several stages use."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        super().__init__()
        self.parts = nn.LayerList([linear() for _ in range(4)])
        self.head, self.change = nn.Linear(FEATURES, CLASSES), change

    def forward(self, x: Any) -> Any:
        first, second, third, fourth = self.parts
        h = first(x)
        y = third(second(h)) + h
        self.change(h)
        return self.head(fourth(y + h) + h)


def stop(h: Any) -> None:
    h.stop_gradient = True


def clip(h: Any) -> None:
    hook(h, lambda grad: grad.clip(-0.01, 0.01))


@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
@pytest.mark.parametrize("change", [stop, clip])
def test_what_is_done_to_a_value_in_a_later_stage_holds_in_all(
    change: Callable[[Any], None], schedule: str
) -> None:
    cut = ["parts.2", "parts.3"]
    require_bits(lambda: Chain(change), batch(3), cut, schedule, micro_batches=3)


def test_a_hook_is_left_out_where_layers_were_frozen_since() -> None:
    with job(2, 3, "ZBH1"):
        paddle.seed(5)
        model = nn.Sequential(*layers_of(HOOKS["hooks"]))
        pipe = fleetpipe.pipeline(
            model, batch(1)[0], nn.CrossEntropyLoss(), split_spec=["2"], verify=False
        )
        for layer in (model[0], model[1]):
            for parameter in layer.parameters():
                parameter.stop_gradient = True
        loss = fleet.distributed_model(pipe).forward_backward_pipeline(batch(3))
        assert float(loss) > 0
        assert [layer.parameters()[0].grad is None for layer in model] == [True] * 2 + [False] * 3


X = paddle.to_tensor(np.random.default_rng(0).standard_normal((8, 3)).astype("float32"))
LABELS = paddle.to_tensor([[0], [1], [2], [0]] * 2)


class Block(nn.Layer):  # type: ignore[misc]
    """A batch norm between layers, and dropout that is an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(3, 3), nn.BatchNorm1D(3)

    def forward(self, x: Any) -> Any:
        # In evaluation it computes something else.
        x = self.norm(self.fc(x).tanh())
        return x * 2 if self.training else x


class Net(nn.Layer):  # type: ignore[misc]
    """Two blocks between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.frozen, self.block = Block(), Block()

    def forward(self, x: Any) -> Any:
        return self.last(self.block(self.frozen(self.first(x))))


class Frozen(Net):
    """Keeps a block in evaluation, in its own ``train``."""

    def train(self, *mode: Any) -> Any:
        super().train(*mode)
        self.frozen.norm.eval()
        return self


class Frozens(nn.Sequential):  # type: ignore[misc]
    """A sublayer that keeps its first layer in evaluation."""

    def train(self, *mode: Any) -> Any:
        super().train(*mode)
        self[0].eval()
        return self


def modes(model: Any) -> dict[str, bool]:
    """The mode of each layer, by name."""
    return {name: part.training for name, part in model.named_sublayers(include_self=True)}


@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
@pytest.mark.parametrize("split_spec", [["block"], ["frozen.norm"]])
def test_a_models_own_train_is_heeded(split_spec: list[str], schedule: str) -> None:
    with job(2, 4, schedule):
        done = trained(Frozen, [X, LABELS], split_spec=split_spec)
        assert done.differing == []
        assert modes(done.pipe.plain) == modes(done.plain)
        done.plain.eval()
        found = done.model.predict_batch(X[:3])
        assert modes(done.pipe.plain) == modes(done.plain)
    # Two micro-batches, of which the second has one row.
    expected = paddle.concat([done.plain(X[:2]), done.plain(X[2:3])])
    assert np.array_equal(found, expected)


def test_a_sublayers_own_train_is_heeded_as_far_as_paddle_calls_it() -> None:
    done = require_bits(lambda: Frozens(Block(), nn.Linear(3, 3), Block()), [X, LABELS], ["2"])
    assert modes(done.pipe.plain) == modes(done.plain)


@pytest.mark.parametrize("before", [True, False])
def test_a_mode_that_the_user_sets_stays(before: bool) -> None:
    """Set before the pipeline is made, and between two steps."""
    with job(2):
        paddle.seed(1)
        model, plain = Net(), Net()
        plain.set_state_dict(model.state_dict())
        if before:
            model.block.eval()
        pipe = fleetpipe.pipeline(model, X[:2], nn.CrossEntropyLoss(), ["block"], verify=False)
        wrapped = fleet.distributed_model(pipe)
        if not before:
            wrapped.train_batch([X, LABELS], sgd(wrapped))
            plain.set_state_dict(pipe.state_dict())
            model.block.eval()
        plain.block.eval()
        loss = wrapped.forward_backward_pipeline([X, LABELS])
        parts = zip(X.split(4), LABELS.split(4))
        expected = accumulate(nn.functional.cross_entropy(plain(x), y) / 4 for x, y in parts)
        assert float(loss) == float(expected)
        ours, theirs = (
            bits({n: p.grad for n, p in one.named_parameters() if p.trainable})
            for one in (pipe, plain)
        )
        assert ours == theirs
        assert len(ours) == 12
        assert modes(model) == modes(plain)
        # What the user says, goes: the model's own train() sets all of them.
        wrapped.train()
        assert all(modes(model).values())
        wrapped.eval()
        assert not any(modes(model).values())


class Switches(Net):
    """Has a layer be in evaluation, in its forward."""

    def forward(self, x: Any) -> Any:
        self.frozen.norm.eval()
        return super().forward(x)


class Toggles(Net):
    """Calls a layer in evaluation, and then in training."""

    def forward(self, x: Any) -> Any:
        self.frozen.norm.eval()
        x = self.frozen(self.first(x))
        self.frozen.norm.train()
        return self.last(self.block(self.frozen.norm(x)))


@pytest.mark.parametrize("kind", [Switches, Toggles])
@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
def test_a_forward_may_switch_modes(kind: type, schedule: str) -> None:
    with job(2, 4, schedule):
        done = trained(kind, [X, LABELS], split_spec=["block"])
        assert done.differing == []
        assert modes(done.pipe.plain) == modes(done.plain)
        done.plain.eval()
        found = done.model.predict_batch(X[:2])
    assert np.array_equal(found, done.plain(X[:2]))
    assert modes(done.pipe.plain) == modes(done.plain)


class Forgets(Net):
    """Leaves a layer in another mode than it finds it in."""

    def forward(self, x: Any) -> Any:
        x = self.frozen(self.first(x))
        self.frozen.norm.eval()
        return self.last(self.block(x))


def test_modes_that_change_from_call_to_call_are_refused_with_the_line() -> None:
    with pytest.raises(CaptureError) as caught:
        fleetpipe.pipeline(Forgets(), X[:2], split_spec=["block"], verify=False)
    text, line = str(caught.value), Forgets.forward.__code__.co_firstlineno + 2
    assert "between training and evaluation, each time otherwise" in text
    assert f"where: {__file__}:{line}\n" in text
    assert "def train(self): super().train(); self.norm.eval()" in text
