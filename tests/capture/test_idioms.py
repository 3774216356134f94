"""Hooks, and gradients switched off, in a plain model that is captured."""

from __future__ import annotations

import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import fleet
from tests.capture.beside import trained
from tests.dygraph.idioms import HOOKS, STOPS, layers_of
from tests.pipelines import batch, job

IDIOMS = {**HOOKS, **STOPS}


@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
@pytest.mark.parametrize("idiom", IDIOMS)
def test_what_is_done_around_layers_has_the_bits_of_the_plain_model(
    idiom: str, schedule: str
) -> None:
    with job(2, 3, schedule):
        done = trained(
            lambda: nn.Sequential(*layers_of(IDIOMS[idiom])),
            batch(3),
            micro_batches=3,
            steps=2,
            split_spec=["2"],
            verify=False,
        )
    assert done.differing == []


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
