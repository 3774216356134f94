"""What a script changes on a built model, beside the same changes on plain layers in a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe import fleet
from fleetpipe.fleet.meta_parallel import LayerDesc
from tests.pipelines import CLASSES, FEATURES, batch, bits, job, pipeline

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


def freeze_norms(root: Any) -> None:
    """Keeps running statistics as they are, as fine-tuning does."""
    for layer in root.sublayers():
        if isinstance(layer, nn.BatchNorm1D):
            layer.eval()


def put_hooks(root: Any) -> None:
    """Has each block's output doubled."""
    for layer in root.sublayers():
        if isinstance(layer, Block):
            layer.register_forward_post_hook(lambda _layer, _inputs, output: output * 2)


def normalize_weights(root: Any) -> None:
    """Splits each Linear's weight into its direction and its length."""
    for layer in root.sublayers():
        if isinstance(layer, nn.Linear):
            nn.utils.weight_norm(layer)


def join_weights(root: Any) -> None:
    """Takes that back."""
    for layer in root.sublayers():
        if isinstance(layer, nn.Linear):
            nn.utils.remove_weight_norm(layer)


def prune(root: Any) -> None:
    """Gives the last layer fewer inputs that count, by a mask of its own."""
    last = root.sublayers()[-1]
    mask = paddle.ones([8, 1])
    mask[::2] = 0.0
    last.register_buffer("mask", mask)
    last.weight.set_value(last.weight * mask)


CHANGES: list[Any] = [
    [put_adapters],
    [put_adapters, lambda root: None, drop_adapters],
    [lambda root: None, put_adapters],
    [freeze_norms],
    [lambda root: None, freeze_norms],
    [put_hooks],
    [normalize_weights, lambda root: None, join_weights],
    [prune, put_adapters],
    [lambda root: setattr(root, "2", nn.LayerNorm(8)), lambda root: setattr(root, "2", nn.Tanh())],
]
WAYS = [("1F1B", {}), ("ZBH1", {}), ("ZBV", {}), ("1F1B", {"recompute_interval": 2})]


@pytest.mark.parametrize(("schedule", "options"), WAYS)
@pytest.mark.parametrize("changes", CHANGES)
def test_changes_before_a_step_are_followed_in_bits(
    changes: list[Change], schedule: str, options: dict[str, Any]
) -> None:
    if options:
        options = {**options, "recompute_ctx": {}}
    with job(2, 4, schedule):
        model = pipeline(entries(), **options)
        plain = nn.Sequential(*(entry.build_layer() for entry in entries()))
        plain.set_state_dict(model.layers.full_state_dict())
        for step in range(4):
            if step < len(changes):
                for root in (model.layers, plain):
                    paddle.seed(step)
                    changes[step](root)
            optimizer, plainly = (
                paddle.optimizer.Momentum(
                    0.1, parameters=[p for p in root.parameters() if not p.stop_gradient]
                )
                for root in (model, plain)
            )
            loss = model.train_batch(batch(seed=step), fleet.distributed_optimizer(optimizer))
            total = 0.0
            for x, y in zip(*(part.split(4) for part in batch(seed=step))):
                part = nn.functional.cross_entropy(plain(x), y) / 4
                part.backward()
                total = total + part.detach()
            plainly.step()
            plainly.clear_grad()
            if step % 2:  # and an evaluation between leaves each layer's own mode
                model.eval_batch(batch(seed=9), compute_loss=True)
            assert loss.numpy().tobytes() == total.numpy().tobytes()
            assert bits(model.layers.state_dict()) == bits(plain.state_dict())
