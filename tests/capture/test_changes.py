"""What a script changes on a model between two batches is run from then on, or refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.nn import functional

import fleetpipe
from fleetpipe import fleet
from fleetpipe.errors import CaptureError
from tests.pipelines import accumulate, begin, job

SCALES = {"k": 1.0}


def scaled(x: Any) -> Any:
    return x * SCALES["k"]


class Gate(nn.Layer):  # type: ignore[misc]
    """Is opened, and has a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("bias", paddle.zeros([8]))
        self.dropped = nn.Dropout(0.0)

    def forward(self, x: Any) -> Any:
        return self.dropped(self.inner(x)) + self.bias


class Net(nn.Layer):  # type: ignore[misc]
    """Depends on attributes of many kinds."""

    kind = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.gate, self.norm, self.last = Gate(), nn.LayerNorm(8), nn.Linear(8, 4)
        self.tau, self.scalar, self.array = 1.0, np.float32(1.0), np.ones(8, "float32")
        self.deep, self.act, self.scales = True, functional.tanh, [1.0, {"inner": (1.0,)}]
        self.early, self.gated = False, True
        self.config = SimpleNamespace(inner=SimpleNamespace(rate=1.0))

    @property
    def rate(self) -> float:
        return float(self.config.inner.rate)

    def forward(self, x: Any) -> Any:
        x = self.act(scaled(self.first(x)) / self.tau) * self.scales[0]
        if self.early:
            x = x + self.last.weight.sum()
        x = (
            (self.gate(x) if self.gated else x)
            * float(self.scalar)
            * paddle.to_tensor(self.array)
            * self.kind
        )
        x = x * self.scales[1]["inner"][0] * self.rate
        return self.last(self.norm(x) if self.deep else x)


def _set(*path: Any) -> Callable[[Any], None]:
    """Returns what sets an attribute, or the entry of a container, by the way to it."""
    *way, last, value = path

    def change(net: Any) -> None:
        for step in way:
            net = getattr(net, step) if isinstance(step, str) else net[step[0]]
        setattr(net, last, value) if isinstance(last, str) else net.__setitem__(last[0], value)

    return change


def _half(*arguments: Any) -> Any:
    return arguments[-1] * 0.5


def _freeze(net: Any) -> None:
    net.last.weight.stop_gradient = net.first[0].bias.stop_gradient = True


def _move(model: Any) -> None:
    for layer in model.sublayers():
        if isinstance(layer, Gate):
            layer.bias = layer.bias + 2.0


#: In an order in which each shows: a layer with a hook, or one that is not called, hides others.
CHANGES: dict[str, Callable[[Any], object]] = {
    "number": _set("tau", 0.25),
    "function": _set("act", functional.gelu),
    "entry of a list": _set("scales", [0], 0.5),
    "entry of a dict": _set("scales", [1], ["inner"], (0.5,)),
    "scalar": _set("scalar", np.float32(0.5)),
    "array": _set("array", [2], 3.0),
    "configuration": _set("config", "inner", "rate", 0.5),
    "global": lambda net: SCALES.update(k=0.5),
    "class": lambda net: setattr(Net, "kind", 0.5),
    "epsilon": _set("norm", "_epsilon", 1e-3),
    "layer appended": lambda net: net.first.add_sublayer("last", nn.Tanh()),
    "layer replaced": _set("gate", "dropped", nn.Sigmoid()),
    "buffer": _move,
    "frozen": _freeze,
    "hook": lambda net: net.first.register_forward_post_hook(_half),
    "hook of a leaf": lambda net: net.gate.inner.register_forward_post_hook(_half),
    "hook of the root": lambda net: net.register_forward_post_hook(_half),
    "flag": _set("deep", False),
    "no cut": _set("gated", False),
}


@pytest.fixture(autouse=True)
def _as_before() -> Any:
    yield
    SCALES["k"], Net.kind = 1.0, 1.0


class Trained:
    """A captured model and a plain one, changed alike and trained alike."""

    def __init__(
        self, verify: Any = False, cut: str = "gate", state: Any = None, change: Any = None
    ) -> None:
        paddle.seed(3)
        self.net, self.plain = Net(), Net()
        if change is not None:
            self.net.set_state_dict(state)
            self.change(change)
        self.plain.set_state_dict(self.net.state_dict())
        self.numbers, self.loss_fn = np.random.default_rng(0), nn.CrossEntropyLoss()
        self.pipe = fleetpipe.pipeline(
            self.net, paddle.ones([2, 8]), self.loss_fn, [cut], verify=verify
        )
        self.model = fleet.distributed_model(self.pipe)
        ours, theirs = (
            paddle.optimizer.Adam(0.01, parameters=model.parameters())
            for model in (self.pipe, self.plain)
        )
        self.optimizers = fleet.distributed_optimizer(ours), theirs

    def change(self, change: Callable[[Any], object]) -> None:
        """Changes both models."""
        change(self.net)
        change(self.plain)

    def step(self) -> None:
        """Trains both models on a batch, and compares them."""
        inputs = paddle.to_tensor(self.numbers.standard_normal((4, 8)).astype("float32"))
        labels = paddle.to_tensor(self.numbers.integers(0, 4, [4, 1]))
        ours, theirs = self.optimizers
        loss = self.model.train_batch([inputs, labels], ours)
        self.plain.train()
        parts = zip(inputs.split(2), labels.split(2))
        total = accumulate(self.loss_fn(self.plain(x), y) / 2 for x, y in parts)
        theirs.step()
        theirs.clear_grad()
        assert loss.numpy() == total.numpy()
        state = self.pipe.full_state_dict()
        for name, tensor in self.plain.state_dict().items():
            assert (state[name].numpy() == tensor.numpy()).all(), name
        self.plain.eval()
        predicted = self.model.predict_batch(inputs[:2])
        if predicted is not None:  # the last rank has it
            assert (predicted.numpy() == self.plain(inputs[:2]).numpy()).all()


def test_what_is_changed_is_run_from_the_next_batch_on() -> None:
    with job(2, 2):
        trained = Trained()
        trained.step()
        for change in CHANGES.values():
            trained.change(change)
            trained.step()


def test_the_copy_beside_which_the_first_batches_are_trained_is_changed_too() -> None:
    with job(2, 2):
        trained = Trained("first")
        trained.step()
        for name in [name for name in CHANGES if name not in ("flag", "no cut")]:
            trained.change(CHANGES[name])
        trained.step()


def on_each_rank() -> list[str]:
    """Makes changes one after another, and at last one that is refused and taken back.

    The first is made on rank 1 alone, between two batches that are also trained plainly.
    """
    begin(2, 2)
    trained, refusals = Trained("first"), []
    trained.step()
    if paddle.distributed.get_rank() == 1:
        trained.net.note = 1
    trained.step()
    for name in ("number", "hook", "global", "layer appended", "buffer", "flag", "frozen"):
        change = CHANGES[name]
        # Of other ranks' buffers there is no memory.
        change(trained.pipe if name == "buffer" else trained.net)
        change(trained.plain)
        trained.step()
    for early in (True, True, False):
        trained.change(_set("early", early))
        try:
            trained.step()
        except CaptureError as error:
            refusals.append(str(error).partition("\n")[0])
    return refusals


def test_ranks_follow_and_refuse_alike(on_ranks: Callable[..., list[Any]]) -> None:
    first, second = on_ranks(on_each_rank, 2)
    assert first == second
    assert [text[:19] for text in first] == ["'early' has changed"] * 2


def test_it_is_captured_once_for_what_a_script_goes_back_and_forth_between() -> None:
    with job(2, 2):
        trained = Trained()
        captures = []
        for step in range(8):
            trained.change(_set("deep", step % 2 == 0))
            trained.step()
            captures.append(trained.pipe.captures.fingerprint_number)
    assert max(captures) == 1


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "head": (lambda net: setattr(net, "last", nn.Linear(8, 4)), "last.weight"),
    "wrapped": (lambda net: setattr(net, "last", nn.Sequential(net.last)), "last.weight"),
    "parameter": (lambda net: setattr(net.norm, "bias", nn.Linear(8, 8).bias), "norm.bias"),
    "normed": (lambda net: nn.utils.weight_norm(net.last), "last.weight"),
    "used elsewhere": (_set("early", True), "early"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_fits_no_stage_is_refused_again_and_again(name: str) -> None:
    change, named = REFUSED[name]
    with job(2, 2):
        trained = Trained()
        trained.step()
        before = {name: tensor.numpy() for name, tensor in trained.net.state_dict().items()}
        trained.change(change)
        for _ in range(2):
            with pytest.raises(CaptureError, match=f"'{named}.* has changed on the model"):
                trained.step()
        # As the error says: what is trained goes into a new model, which is changed then.
        state = trained.pipe.full_state_dict()
        assert all((state[name].numpy() == before[name]).all() for name in {*state, *before})
        anew = Trained(False, "norm", state, change)
        for _ in range(2):
            anew.step()


def test_opened_layers_are_found_and_a_buffer_made_anew_is_saved() -> None:
    with job(2, 2):
        trained = Trained()
        (gate,) = (layer for layer in trained.model.sublayers() if isinstance(layer, Gate))
        gate.bias = gate.bias + 3.0
        assert (trained.pipe.state_dict()["gate.bias"].numpy() == 3.0).all()
