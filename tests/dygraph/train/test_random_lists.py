"""Random lists of layers under a split backward have the bits of a plain loop over them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe import fleet
from tests.dygraph.random_models import random_batch, random_list
from tests.pipelines import ROWS, accumulate, bits, job, pipeline

#: ``python -m tests.dygraph.train.test_random_lists FIRST LAST`` tries others.
NUMBERS = range(40)

SCHEDULES = ["ZBH1", "ZBH2", "ZBV", "VHalf", "VMin", "DualPipeV"]

#: What clips: nothing, something that clips, something that does not, each gradient alone.
CLIPS = [None, nn.ClipGradByGlobalNorm(0.5), nn.ClipGradByGlobalNorm(100.0), nn.ClipGradByNorm(0.1)]


def optimizer_of(number: int, parameters: list[Any]) -> Any:
    draw = random.Random(number)
    kind = draw.choice(["SGD", "Momentum", "Adam", "AdamW", "RMSProp", "Adagrad"])
    made = getattr(paddle.optimizer, kind)
    return made(0.05, parameters=parameters, grad_clip=draw.choice(CLIPS))


def train_beside_a_loop(
    model: Any,
    data: Callable[[int], list[Any]],
    micro_batches: int,
    *,
    optimizer_of: Callable[[Any], Any] = lambda p: paddle.optimizer.SGD(0.1, parameters=p),
    loss_fn: Callable[[Any, Any], Any] = nn.functional.cross_entropy,
    steps: int = 2,
    zeroes: bool = True,
) -> None:
    """Trains a pipeline, and its layers in a plain loop: losses, gradients and state must agree.

    Args:
        model: The pipeline.
        data: Makes the batch of a step.
        micro_batches: Those of a batch.
        optimizer_of: Makes an optimizer of parameters.
        loss_fn: The loss function.
        steps: How many.
        zeroes: Whether gradients are zeroed after a step, or freed.
    """
    plain = model.layers.single_model()
    model.layers.copy_to(plain)
    plain.train()
    ours = fleet.distributed_optimizer(optimizer_of(model.parameters()))
    theirs = optimizer_of(plain.parameters())
    for step in range(steps):
        inputs, labels = data(step)
        loss = model.forward_backward_pipeline([inputs, labels])
        parts = zip(*(part.split(micro_batches) for part in (inputs, labels)))
        total = accumulate(loss_fn(plain(x), y) / micro_batches for x, y in parts)
        assert loss.numpy().tobytes() == total.numpy().tobytes(), step
        assert gradients(model.layers) == gradients(plain), step
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.clear_grad(set_to_zero=zeroes)
        assert bits(model.layers.state_dict()) == bits(plain.state_dict()), step


def require_same(number: int) -> None:
    """Trains a random list three steps, and the same layers in a plain loop."""
    draw = random.Random(number)
    ranks, micro_batches = draw.choice([2, 3, 4]), draw.choice([1, 2, 3, 5])
    interval = draw.choice([0, 0, 1, 2])
    with job(ranks, micro_batches, draw.choice(SCHEDULES), guards=number % 3):
        more = {"recompute_interval": interval, "recompute_ctx": {}} if interval else {}
        train_beside_a_loop(
            pipeline(random_list(number), **more),
            lambda step: random_batch(10 * number + step, micro_batches * ROWS),
            micro_batches,
            optimizer_of=lambda parameters: optimizer_of(number, parameters),
            steps=3,
            zeroes=bool(number % 2),
        )


def gradients(model: Any) -> dict[str, bytes]:
    """The bytes of the gradients that there are."""
    found = {name: p.grad for name, p in model.named_parameters()}
    return bits({name: grad for name, grad in found.items() if grad is not None})


@pytest.mark.once_for("2", "3")
@pytest.mark.parametrize("number", NUMBERS)
def test_a_random_list_has_the_bits_of_a_plain_loop(number: int) -> None:
    require_same(number)


if __name__ == "__main__":
    import sys

    for one in range(*map(int, sys.argv[1:])):
        require_same(one)
        print(one, "is equal", flush=True)
