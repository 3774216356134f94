"""Hooks, writes in place and gradients switched off have the bits of a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle import nn

from tests.dygraph.idioms import HOOKS, STOPS, WRITES, Called, layers_of, leaf
from tests.dygraph.train.test_random_lists import gradients
from tests.pipelines import ROWS, batch, bits, job, pipeline, sgd

IDIOMS = {**HOOKS, **STOPS, **WRITES}
SCHEDULES = ["1F1B", "Interleaved1F1B", "ZBH1", "ZBV"]


def require_bits(
    make: Callable[[], list[Any]], schedule: str, loss_fn: Callable[[Any, Any], Any]
) -> Any:
    """Trains a list of layers two steps, and a plain loop; returns the wrapped model."""
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
        return model


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("idiom", IDIOMS)
def test_what_is_done_around_layers_has_the_bits_of_a_plain_loop(idiom: str, schedule: str) -> None:
    require_bits(lambda: layers_of(IDIOMS[idiom]), schedule, nn.CrossEntropyLoss())


def halves(x: Any, own: Any, other: Any) -> Any:
    return paddle.concat([x[:, :3], x[:, 3:] * other[3:]], 1) @ own


def test_a_leaf_of_which_one_call_cannot_wait_adds_up_all_in_i() -> None:
    """On a tensor without gradient the leaf uses what Paddle can divide, on another it does not."""
    twice = lambda: Called(lambda x, own: own(own(x.detach() * 2)) + x, leaf(halves))  # noqa: E731
    model = require_bits(lambda: layers_of(twice), "ZBH1", nn.CrossEntropyLoss())
    report = model.deferral_report()
    assert {"1.parts.0.matrix", "3.parts.0.matrix"} <= set(report.immediate)
    assert "0.weight" in report.deferred
