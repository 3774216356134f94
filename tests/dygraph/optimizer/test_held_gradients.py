"""What is left from earlier batches is added to as it is: only what a batch adds is reduced."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleetpipe import fleet
from fleetpipe.fleet.meta_parallel import LayerDesc, SharedLayerDesc
from tests.jobs import job
from tests.pipelines import pipeline


def head(embedding: Any, value: Any) -> Any:
    return paddle.matmul(value, embedding.weight, transpose_y=True)


def layers() -> list[Any]:
    return [
        SharedLayerDesc("tied", nn.Embedding, None, "weight", 10, 8),
        LayerDesc(nn.Linear, 8, 8),
        SharedLayerDesc("tied", nn.Embedding, head, "weight", 10, 8),
    ]


def apart(degrees: dict[str, int], scale: str) -> float:
    """Trains two batches, one after another and without a step between; how far that is off."""
    with job(micro_batches=2, **degrees):
        fleet.fleet._user_defined_strategy.gradient_scale_configs = {"scale_strategy": scale}
        model = pipeline(layers())
        paddle.seed(fleet.worker_index() // degrees.get("pp", 1))
        batches = [[paddle.randint(0, 10, [4, 5]), paddle.randint(0, 10, [4, 5])] for _ in "ab"]
        parameters = model.parameters()

        def cleared() -> list[Any]:
            gradients = [p.grad.numpy() for p in parameters]
            for parameter in parameters:
                parameter.clear_gradient(False)
            return gradients

        wanted = [np.ones(p.shape, "float32") for p in parameters]
        for data in batches:
            model.forward_backward_pipeline(data)
            wanted = [total + one for total, one in zip(wanted, cleared())]
        for parameter in parameters:  # a loss of the script's own has left something
            parameter.grad = paddle.ones_like(parameter)
        for data in batches:
            model.forward_backward_pipeline(data)
        return max(float(abs(one - total).max()) for one, total in zip(cleared(), wanted))


@pytest.mark.parametrize(
    ("degrees", "scale"),
    [({"pp": 2}, "avg"), ({"dp": 2}, "avg"), ({"dp": 2}, "sum"), ({"sharding": 2}, "sum")],
)
def test_batches_without_a_step_between_add_up(on_ranks: Any, degrees: Any, scale: str) -> None:
    assert max(on_ranks(apart, 2, degrees, scale)) < 1e-6
