"""Random lists of layers in random layouts, beside plain Paddle that adds by halves, by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe import fleet
from fleetpipe.fleet.meta_parallel import LayerDesc, SharedLayerDesc
from tests.pipelines import FEATURES, batch, bits, job, pipeline

WIDTH = FEATURES
MICRO_BATCHES, SCHEDULES = (
    (1, 2, 3, 4, 5, 6, 8, 12),
    ("1F1B", "FThenB", "ZBH1", "ZBH2", "ZBV", "DualPipeV"),
)


class Sometimes(nn.Layer):
    """Uses its weight for some micro-batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return self.linear(x) if float(x.sum()) > 0 else x * 1.5


class Frozen(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.weight.stop_gradient = True


def transposed(layer: Any, x: Any) -> Any:
    return paddle.matmul(x, layer.weight, transpose_y=True) + x


_TIED = partial(SharedLayerDesc, "tied", nn.Linear, None, "weight", WIDTH, WIDTH)
#: What makes an entry of the list.
KINDS: list[Callable[[], Any]] = [
    *(partial(LayerDesc, nn.Linear, WIDTH, WIDTH), partial(LayerDesc, nn.LayerNorm, WIDTH)),
    *(partial(LayerDesc, Sometimes), partial(LayerDesc, Frozen), lambda: paddle.tanh, _TIED),
    partial(SharedLayerDesc, "tied", nn.Linear, transposed, "weight", WIDTH, WIDTH),
]


def optimizer_of(parameters: Any) -> Any:
    clip = nn.ClipGradByGlobalNorm(0.5)
    return paddle.optimizer.AdamW(0.01, parameters=parameters, grad_clip=clip)


def tree(parts: Any) -> Any:
    half = len(parts) // 2
    return (
        tree(parts[:half]) + tree(parts[half:]) if len(parts) % 2 == 0 else sum(parts[1:], parts[0])
    )


def by_hand(
    layers: list[Any], micro_batches: int, order: list[str]
) -> tuple[list[bytes], dict[str, bytes]]:
    """Losses and parameters of two steps: each use of a tied weight is a layer of its own."""
    runs: list[Callable[[Any], Any]] = []
    uses: dict[str, list[Any]] = {name: [] for name in order}
    for number, entry in enumerate(layers):
        paddle.seed(1234 + number)
        if not isinstance(entry, LayerDesc):
            runs.append(entry)
            continue
        layer, tied = entry.build_layer(), isinstance(entry, SharedLayerDesc)
        runs.append(partial(entry.forward_func, layer) if tied and entry.forward_func else layer)
        for name, parameter in layer.named_parameters():
            uses[f"shared_layers.tied.{name}" if tied else f"{number}.{name}"].append(parameter)
    leaves = [(name, one) for name, each in uses.items() for one in each if not one.stop_gradient]
    optimizer, losses = optimizer_of([each[0] for each in uses.values()]), []
    for step in range(2):
        for first, *others in uses.values():
            for other in others:
                other.set_value(first)
        parts, shares = [], []
        for x, label in zip(*(part.split(micro_batches) for part in batch(micro_batches, step))):
            for run in runs:
                x = run(x)
            shares.append(nn.functional.cross_entropy(x, label) / micro_batches)
            parts.append(paddle.grad(shares[-1], [one for _, one in leaves], allow_unused=True))
        losses.append(tree(shares).numpy().tobytes())
        totals: dict[str, Any] = {}
        for (name, one), gradients in zip(leaves, zip(*parts)):
            if any(gradient is not None for gradient in gradients):
                zero = paddle.zeros_like(one)
                total = tree([zero if gradient is None else gradient for gradient in gradients])
                totals[name] = totals[name] + total if name in totals else total
        for name, total in totals.items():
            uses[name][0].grad = total
        optimizer.step()
        optimizer.clear_grad()
    return losses, {name: each[0].numpy().tobytes() for name, each in uses.items()}


@pytest.mark.parametrize("number", range(12))
def test_a_random_layout_has_the_bits_of_the_sums_by_hand(number: int) -> None:
    draw = random.Random(number)
    layers = [LayerDesc(nn.Linear, WIDTH, WIDTH), *(draw.choice(KINDS)() for _ in range(9))]
    layers.append(LayerDesc(nn.Linear, WIDTH, 4))
    micro_batches, schedule, pp = draw.choice(MICRO_BATCHES), draw.choice(SCHEDULES), 1 + number % 3
    stages = pp * (2 if schedule in ("ZBV", "DualPipeV") else 1)
    cuts = [0, *sorted(draw.sample(range(1, len(layers)), stages - 1)), len(layers)]
    with job(pp, micro_batches, schedule, sums="tree"):
        model = pipeline(layers, seg_method=cuts)
        optimizer = fleet.distributed_optimizer(optimizer_of(model.parameters()))
        losses = [model.train_batch(batch(micro_batches, step), optimizer) for step in range(2)]
        state = bits(model.layers.full_state_dict())
    totals = [loss.numpy().tobytes() for loss in losses]
    assert (totals, state) == by_hand(layers, micro_batches, [*state])
