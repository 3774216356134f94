"""Hooks, writes in place and gradients switched off have the bits of a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle import nn

from tests.dygraph.idioms import HOOKS, STOPS, WRITES, layers_of
from tests.dygraph.train.test_random_lists import gradients
from tests.pipelines import ROWS, batch, bits, job, pipeline, sgd

IDIOMS = {**HOOKS, **STOPS, **WRITES}
SCHEDULES = ["1F1B", "Interleaved1F1B", "ZBH1", "ZBV"]


def require_bits(
    make: Callable[[], list[Any]], schedule: str, loss_fn: Callable[[Any, Any], Any]
) -> None:
    """Trains a list of layers two steps, and a plain loop."""
    with job(2, 3, schedule):
        paddle.seed(5)
        model = pipeline(make(), loss_fn=loss_fn)
        plain = nn.Sequential(*make())
        plain.set_state_dict(model.layers.state_dict())
        ours = sgd(model)
        theirs = paddle.optimizer.SGD(0.1, parameters=plain.parameters())
        for step in range(2):
            inputs, labels = batch(3, seed=step)
            loss = model.forward_backward_pipeline([inputs, labels])
            total = paddle.zeros([])
            for k in range(3):
                rows = slice(k * ROWS, (k + 1) * ROWS)
                share = loss_fn(plain(inputs[rows]), labels[rows]) / 3
                share.backward()
                total = total + share.detach()
            assert loss.numpy().tobytes() == total.numpy().tobytes()
            assert gradients(model.layers) == gradients(plain)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.clear_grad()
            assert bits(model.layers.state_dict()) == bits(plain.state_dict())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("idiom", IDIOMS)
def test_what_is_done_around_layers_has_the_bits_of_a_plain_loop(idiom: str, schedule: str) -> None:
    require_bits(lambda: layers_of(IDIOMS[idiom]), schedule, nn.CrossEntropyLoss())
