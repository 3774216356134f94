"""Hooks, and gradients switched off, in a plain model that is captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe import fleet
from tests.capture.beside import require_bits
from tests.dygraph.idioms import HOOKS, STOPS, hook, layers_of, linear
from tests.pipelines import CLASSES, FEATURES, batch, job

IDIOMS = {**HOOKS, **STOPS}


@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
@pytest.mark.parametrize("idiom", IDIOMS)
def test_what_is_done_around_layers_has_the_bits_of_the_plain_model(
    idiom: str, schedule: str
) -> None:
    require_bits(
        lambda: nn.Sequential(*layers_of(IDIOMS[idiom])),
        batch(3),
        ["2"],
        micro_batches=3,
        steps=2,
        verify=False,
        schedule=schedule,
    )


class Chain(nn.Layer):
    """A value that layers of several stages use."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        super().__init__()
        self.parts = nn.LayerList([linear() for _ in range(4)])
        self.head, self.change = nn.Linear(FEATURES, CLASSES), change

    def forward(self, x: Any) -> Any:
        first, second, third, fourth = self.parts
        h = first(x)
        y = third(second(h)) + h
        self.change(h)
        return self.head(fourth(y + h) + h)


def stop(h: Any) -> None:
    h.stop_gradient = True


def clip(h: Any) -> None:
    hook(h, lambda grad: grad.clip(-0.01, 0.01))


@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
@pytest.mark.parametrize("change", [stop, clip])
def test_what_is_done_to_a_value_in_a_later_stage_holds_in_all(
    change: Callable[[Any], None], schedule: str
) -> None:
    require_bits(
        lambda: Chain(change),
        batch(3),
        ["parts.2", "parts.3"],
        micro_batches=3,
        steps=2,
        verify=False,
        schedule=schedule,
    )


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
