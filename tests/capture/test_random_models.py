"""Random plain models, cut at random places, give their own bits, and so do their captures."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import paddle
import pytest

import fleetpipe
from fleetpipe.dygraph.nest import differentiable
from tests.capture.models import trained
from tests.capture.random_models import ROWS, WIDTH, RandomModel
from tests.pipelines import job

#: ``python -m tests.capture.test_random_models FIRST LAST`` tries others.
NUMBERS = range(8)


def loss_fn(output: Any, labels: Any) -> Any:
    return sum((tensor.mean() for tensor in differentiable(output)), labels.mean())


def require_same(number: int) -> None:
    """Trains a random model in 2 to 4 stages beside itself, two steps.

    A gradient that is added up stage by stage is the same to rounding, and so is what it changes.
    """
    draw = random.Random(number)
    values = np.random.default_rng(number).standard_normal((4 * ROWS, WIDTH)).astype("float32")
    x = paddle.to_tensor(values)
    found = fleetpipe.explain(RandomModel(number), x[:ROWS])
    places = [border for border in found.places.values() if not border.call]
    chosen = draw.sample(places, min(draw.choice([1, 2, 3]), len(places)))
    spec = {border.path: border.point for border in chosen}
    with job(len(spec) + 1):
        done = trained(
            lambda: RandomModel(number),
            [x, x],
            loss_fn=loss_fn,
            keyed=True,
            split_spec=spec,
            verify=True,
        )
    ours, theirs = done.pipe.state_dict(), done.plain.state_dict()
    assert done.differing == [] or done.pipe.proof.summed, number
    for name in theirs:
        assert np.allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-6), (number, name)


@pytest.mark.once_for("4", "5", "6", "7")
@pytest.mark.parametrize("number", NUMBERS)
def test_a_random_model_gives_its_own_bits(number: int) -> None:
    require_same(number)


if __name__ == "__main__":
    import sys

    for one in range(*map(int, sys.argv[1:])):
        require_same(one)
        print(one, "is equal", flush=True)
