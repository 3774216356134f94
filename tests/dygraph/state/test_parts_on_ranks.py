"""What ranks have of one model: a loss that is trained, measures of parameters, built layers."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleetpipe import fleet
from fleetpipe.errors import CheckpointError, ConfigError
from fleetpipe.fleet.meta_parallel import LayerDesc
from tests.pipelines import (
    CLASSES,
    FEATURES,
    batch,
    bits,
    job,
    mlp_layers,
    model_in_job,
    pipeline,
    sgd,
)


class Tasks(nn.Layer):
    """Weighs two losses by a trained weight of each, and centres them by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([2])
        self.register_buffer("centre", paddle.zeros([CLASSES]))

    def forward(self, output: Any, label: Any) -> Any:
        self.centre = 0.9 * self.centre + 0.1 * output.detach().mean(0)
        square = (output - self.centre).square().mean()
        loss = nn.functional.cross_entropy(output, label)
        return loss * paddle.exp(-self.weight[0]) + square * self.weight[1].exp()


def trained_loss(ranks: int, **options: Any) -> list[dict[str, bytes]]:
    """The state of a loss after each of three steps."""
    with job(ranks, 2, **options):
        paddle.seed(0)
        loss = Tasks()
        model = pipeline(loss_fn=loss)
        parameters = [*model.parameters(), *loss.parameters()]
        adam = fleet.distributed_optimizer(paddle.optimizer.Adam(0.1, parameters=parameters))
        states = []
        for step in range(3):
            model.train_batch(batch(2, step), adam)
            states.append(bits(loss.state_dict()))
        return states


@pytest.mark.parametrize("options", [{}, {"dp": 2}])
def test_each_rank_has_the_state_of_a_trained_loss(on_ranks: Any, options: dict[str, int]) -> None:
    alone = trained_loss(2)
    assert alone[0] != alone[2]
    ranks = 2 * options.get("dp", 1)
    assert on_ranks(partial(trained_loss, 2, **options), ranks) == [alone] * ranks


def measured(ranks: int) -> Any:
    """Shapes, a norm, and the loss of a batch after an initialization over all parameters."""
    with job(ranks, 2):
        model = pipeline()
        pipe = model.layers
        largest = pipe.whole_parameters(lambda parameter: float(parameter.abs().max()))
        shapes = pipe.whole_parameters()
        paddle.seed(3)
        drawn = {name: 0.1 * paddle.randn(shape) for name, shape in shapes.items()}
        pipe.load_from({**pipe.full_state_dict(), **drawn})
        loss = model.train_batch(batch(2), sgd(model))
        return [*shapes.items()], max(largest.values()), loss.numpy().tobytes()


def test_what_is_computed_over_all_parameters_is_alike_on_any_ranks(on_ranks: Any) -> None:
    alone = measured(2)
    assert [name for name, _ in alone[0]][:2] == ["0.weight", "0.bias"]
    assert alone[0][0][1] == [FEATURES, 8]
    assert on_ranks(partial(measured, 2), 2) == [alone] * 2


def in_two_pipelines(seg_method: list[int], trains: bool) -> str:
    """What is said of built layers that stand alone, and behind others, on two ranks."""
    body = [nn.Linear(8, 8), nn.Linear(8, 8)]
    for layer in body:
        for parameter in layer.parameters():
            parameter.stop_gradient = not trains
    with job(2, 2):
        # The wrapper is needed while the other is made.
        first = pipeline([LayerDesc(nn.Linear, 8, 8), *body], seg_method=seg_method)
        try:
            pipeline([*body, LayerDesc(nn.Linear, 8, CLASSES)], seg_method=[0, 1])
        except ConfigError as error:
            return str(error).splitlines()[0]
        return f"as {type(first).__name__}"


def test_built_layers_of_two_pipelines_are_on_the_same_ranks(on_ranks: Any) -> None:
    refused = "a built layer stands in two pipelines, which have it on different ranks"
    assert on_ranks(partial(in_two_pipelines, [0, 1], True), 2) == [refused] * 2
    for right in (([0, 2], True), ([0, 1], False)):
        assert on_ranks(partial(in_two_pipelines, *right), 2) == ["as PipelineParallel"] * 2
    assert in_two_pipelines([0, 1], True) == "as PipelineParallel"


class Normed(nn.Layer):
    """A Linear whose weight is of a norm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.weight_norm(nn.Linear(FEATURES, FEATURES))

    def forward(self, x: Any) -> Any:
        return self.inner(x)


@pytest.mark.parametrize("save", ["full_state_dict", "copy_to"])
def test_the_whole_state_names_what_was_taken_out_of_a_layer(save: str) -> None:
    with model_in_job(2, 2, layers=[LayerDesc(Normed), *mlp_layers()]) as model:
        before = model.predict_batch(batch(2)[0])
        single = model.layers.single_model()
        (normed,) = (part for part in model.layers.sublayers() if isinstance(part, Normed))
        nn.utils.remove_weight_norm(normed.inner)
        assert np.allclose(before, model.predict_batch(batch(2)[0]), atol=1e-6)
        with pytest.raises(CheckpointError, match=r"0\.inner\.weight_v, 0\.inner\.weight_g"):
            getattr(model.layers, save)(*([single] if save == "copy_to" else []))
