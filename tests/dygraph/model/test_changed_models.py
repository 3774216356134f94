"""What a script changes on a built model, modes included, beside the same in plain Paddle."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe import fleet
from fleetpipe.fleet.meta_parallel import LayerDesc
from tests.pipelines import (
    CLASSES,
    FEATURES,
    accumulate,
    batch,
    bits,
    job,
    model_in_job,
    pipeline,
    sgd,
)

Change = Callable[[Any], object]


class Adapted(nn.Layer):
    """A frozen Linear with an adapter of low rank beside it."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        for parameter in base.parameters():
            parameter.stop_gradient = True
        rows, columns = base.weight.shape
        constant = nn.initializer.Constant
        self.a = self.create_parameter([rows, 2], default_initializer=constant(0.3))
        self.b = self.create_parameter([2, columns], default_initializer=constant(0.2))

    def forward(self, x: Any) -> Any:
        return self.base(x) + x @ self.a @ self.b


class Block(nn.Layer):
    """A residual block with a norm of running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.BatchNorm1D(8), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return x + self.fc(self.norm(x)).tanh()


def entries() -> list[Any]:
    """A list whose layers are described."""
    middle = [LayerDesc(Block), LayerDesc(nn.BatchNorm1D, 8), LayerDesc(Block)]
    return [LayerDesc(nn.Linear, FEATURES, 8), *middle, LayerDesc(nn.Linear, 8, CLASSES)]


def put_adapters(root: Any) -> None:
    """Puts an adapter around each Linear, wherever it stands."""
    for name, layer in list(root.named_sublayers()):
        if isinstance(layer, nn.Linear) and "base" not in name:
            *path, last = name.split(".")
            parent = root
            for part in path:
                parent = getattr(parent, part)
            setattr(parent, last, Adapted(layer))


def drop_adapters(root: Any) -> None:
    """Takes them away again, merged into the weights."""
    for parent in [root, *root.sublayers()]:
        for name, layer in list(parent.named_children()):
            if isinstance(layer, Adapted):
                layer.base.weight.set_value(layer.base.weight + layer.a @ layer.b)
                for parameter in layer.base.parameters():
                    parameter.stop_gradient = False
                setattr(parent, name, layer.base)


def each(kind: Any, change: Change) -> Change:
    """Returns a function that changes each layer of a kind."""
    return lambda root: [change(part) for part in root.sublayers() if isinstance(part, kind)]


#: Keeps running statistics as they are, as fine-tuning does.
freeze_norms = each(nn.BatchNorm1D, nn.Layer.eval)
double_outputs = each(Block, lambda part: part.register_forward_post_hook(lambda *v: v[-1] * 2))
#: Splits each weight into its direction and its length; and takes that back.
normalize_weights = each(nn.Linear, nn.utils.weight_norm)
join_weights = each(nn.Linear, nn.utils.remove_weight_norm)


def prune(root: Any) -> None:
    """Gives the last layer fewer inputs that count, by a mask of its own."""
    last = root.sublayers()[-1]
    mask = paddle.ones([8, 1])
    mask[::2] = 0.0
    last.register_buffer("mask", mask)
    last.weight.set_value(last.weight * mask)


CHANGES: list[Any] = [
    [put_adapters, lambda root: None, drop_adapters],
    [lambda root: None, put_adapters],
    [freeze_norms],
    [lambda root: None, freeze_norms],
    [double_outputs],
    [normalize_weights, lambda root: None, join_weights],
    [prune, put_adapters],
    [lambda root: setattr(root, "2", nn.LayerNorm(8)), lambda root: setattr(root, "2", nn.Tanh())],
]
RECOMPUTE = {"recompute_interval": 2, "recompute_ctx": {}}
WAYS = [("1F1B", {}), ("ZBH1", {}), ("ZBV", {}), ("1F1B", RECOMPUTE)]


@pytest.mark.parametrize(("schedule", "options"), WAYS)
@pytest.mark.parametrize("changes", CHANGES)
def test_changes_before_a_step_are_followed_in_bits(
    changes: list[Change], schedule: str, options: dict[str, Any]
) -> None:
    with job(2, 4, schedule):
        model = pipeline(entries(), **options)
        plain = nn.Sequential(*(entry.build_layer() for entry in entries()))
        plain.set_state_dict(model.layers.full_state_dict())
        for step in range(4):
            for root in (model.layers, plain) if step < len(changes) else ():
                paddle.seed(step)
                changes[step](root)
            trained = (
                [p for p in root.parameters() if not p.stop_gradient] for root in (model, plain)
            )
            optimizer, plainly = (paddle.optimizer.Momentum(0.1, parameters=p) for p in trained)
            data = batch(seed=step)
            loss = model.train_batch(data, fleet.distributed_optimizer(optimizer))
            parts = zip(*(part.split(4) for part in data))
            total = accumulate(nn.functional.cross_entropy(plain(x), y) / 4 for x, y in parts)
            plainly.step()
            plainly.clear_grad()
            if step % 2:  # and an evaluation between leaves each layer's own mode
                model.eval_batch(batch(seed=9), compute_loss=True)
            assert loss.numpy().tobytes() == total.numpy().tobytes()
            assert bits(model.layers.state_dict()) == bits(plain.state_dict())


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


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_modes_that_the_script_has_set_count(ranks: int, seed: int) -> None:
    draw = random.Random(seed)
    with model_in_job(ranks, 2, layers=LAYERS, loss_fn=nn.CrossEntropyLoss()) as model:
        pipe, optimizer = model.layers, sgd(model)
        plain = ByHand(pipe)
        norms = [part for part in pipe.sublayers() if isinstance(part, nn.BatchNorm1D)]
        batches: dict[str, Callable[[], object]] = {
            "train_batch": lambda: model.train_batch([X, Y], optimizer),
            "eval_batch": lambda: model.eval_batch([X, Y], compute_loss=True),
            "predict_batch": lambda: model.predict_batch(X),
        }
        calls: list[str] = []
        for _ in range(40):
            call, number = draw.choice(CALLS), draw.randrange(2)
            calls.append(call)
            if call in batches:
                batches[call]()
            else:
                part = norms[number] if "." in call else draw.choice([model, pipe])
                getattr(part, call.removeprefix("norm."))()
            plain.call(call, number)
            states = ([bits(norm.state_dict()) for norm in part] for part in (norms, plain.norms))
            assert next(states) == next(states), calls
