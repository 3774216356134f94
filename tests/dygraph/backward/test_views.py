"""Layers that take views have the bits of a plain loop: recomputed, split, captured."""

from __future__ import annotations

import random
from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe.fleet.meta_parallel import LayerDesc
from tests.dygraph.models import WIDTH
from tests.dygraph.random_models import VIEWS, viewing_batch, viewing_list
from tests.dygraph.train.test_random_lists import train_beside_a_loop
from tests.pipelines import CLASSES, job, pipeline, train

#: ``python -m tests.dygraph.backward.test_views FIRST LAST`` tries others.
NUMBERS = range(24)


def require_same(number: int) -> None:
    """Trains a list two steps, recomputed or not, under any schedule, beside a plain loop."""
    draw = random.Random(number)
    ranks, micro_batches = draw.choice([2, 3]), draw.choice([1, 2, 3])
    interval = draw.choice([0, 1, 1, 2, 3])
    schedule = draw.choice(["1F1B", "FThenB", "ZBH1", "ZBV", "Interleaved1F1B"])
    chunks = 2 if schedule in ("ZBV", "Interleaved1F1B") else 1
    with job(ranks, micro_batches, schedule):
        paddle.seed(number)
        more = {"num_virtual_pipeline_stages": chunks, "recompute_interval": interval}
        train_beside_a_loop(
            pipeline(viewing_list(number), recompute_ctx={}, **more),
            lambda step: viewing_batch(10 * number + step, micro_batches),
            micro_batches,
        )


@pytest.mark.once_for("2", "3")
@pytest.mark.parametrize("number", NUMBERS)
def test_layers_that_take_views_have_the_bits_of_a_plain_loop(number: int) -> None:
    require_same(number)


class Writes(nn.Layer):  # type: ignore[misc]
    """Writes into what it reshapes: a view of its input in one layout, a copy in another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        x.reshape([-1]).scale_(0.5)
        return self.inner(x * 1.0).mean(1)


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("view", ["turned", "slice", "rows", "steps"])
def test_a_write_into_a_reshaped_view_is_made_again_as_in_the_forward(
    view: str, interval: int
) -> None:
    def trained(interval: int) -> Any:
        first, last = LayerDesc(nn.Linear, WIDTH, WIDTH), LayerDesc(nn.Linear, WIDTH, CLASSES)
        layers = [
            first,
            first,
            VIEWS[view],
            LayerDesc(Writes),
            lambda x: x + paddle.zeros([2, 1]),
            last,
        ]
        more = {"seg_method": [0, 1, 6], "recompute_interval": interval, "recompute_ctx": {}}
        return train(
            layers, data=lambda count, step: viewing_batch(step, count), gradients=True, **more
        )

    assert trained(interval) == trained(0)


if __name__ == "__main__":
    import sys

    for one in range(*map(int, sys.argv[1:])):
        require_same(one)
        print(one, "is equal", flush=True)
