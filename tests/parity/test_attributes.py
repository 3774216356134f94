"""What a script sets on layers between two batches is set in the reference as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe import parity
from fleetpipe.fleet.meta_parallel import LayerDesc
from tests.pipelines import batch, model_in_job, sgd


class Scale(nn.Layer):  # type: ignore[misc]
    """Scales by its attributes, and counts its calls in one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.temperature: Any = 1.0
        self.weights = {"first": [1.0, 1.0]}
        self.activation: Callable[[Any], Any] = nn.functional.tanh
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        x = self.activation(self.linear(x)) / self.temperature
        return x * self.weights["first"][1] * (1 + self.calls)


def set_weight(layer: Scale) -> None:
    layer.weights["first"][1] = 0.5


CHANGES: dict[str, Callable[[Scale], None]] = {
    "number": lambda layer: setattr(layer, "temperature", 0.25),
    "tensor": lambda layer: setattr(layer, "temperature", paddle.to_tensor([0.5] * 8)),
    "list in a dict": set_weight,
    "function": lambda layer: setattr(layer, "activation", lambda x: x * 0.5),
}


def scales() -> list[Any]:
    ends = LayerDesc(nn.Linear, 6, 8), LayerDesc(nn.Linear, 8, 4)
    return [ends[0], LayerDesc(Scale), LayerDesc(Scale), ends[1]]


def scale_of(model: Any) -> Scale:
    return next(one for one in model.layers.sublayers() if isinstance(one, Scale))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("step_of_change", [0, 2])
def test_a_changed_attribute_is_changed_in_the_reference(change: str, step_of_change: int) -> None:
    with model_in_job(2, layers=scales()) as model:
        session = parity.begin(model, sgd(model))
        for step in range(4):
            if step == step_of_change:
                CHANGES[change](scale_of(model))
            session.step(batch(seed=step))
            session.eval_batch(batch(seed=step), compute_loss=True)
    assert session.report.differences == [], session.report.verdict()


def test_an_attribute_that_changes_before_an_evaluation_is_changed_in_the_reference() -> None:
    with model_in_job(2, layers=scales()) as model:
        session = parity.begin(model, sgd(model))
        session.step(batch())
        scale_of(model).temperature = 0.25
        session.eval_batch(batch(), compute_loss=True)
        session.predict_batch(batch()[0])
    assert session.report.differences == [], session.report.verdict()


def changed_on_a_rank() -> tuple[bool, int]:
    """Changes the layers that this rank has; each rank compares with the whole model."""
    with model_in_job(2, layers=scales()) as model:
        session = parity.begin(model, sgd(model))
        for step in range(3):
            for layer in (one for one in model.layers.sublayers() if isinstance(one, Scale)):
                layer.temperature = 1 + step
            session.step(batch(seed=step))
    return session.report.bit_exact, session.report.steps


def test_ranks_get_the_attributes_of_other_ranks_layers(on_ranks: Callable[..., Any]) -> None:
    assert on_ranks(changed_on_a_rank, 2) == [(True, 3)] * 2


def test_what_a_batch_changes_in_an_attribute_is_not_copied() -> None:
    def train_batch(data: Any, optimizer: Any, *_: Any) -> Any:
        loss = model.train_batch(data, optimizer)
        scale_of(model).calls += 1
        return loss

    with model_in_job(2, layers=scales()) as model:
        session = parity.begin(model, sgd(model), train_batch=train_batch)
        for step in range(2):
            session.step(batch(seed=step))
    assert session.report.failures[0].step == 1
    assert (session.report.failures[0].quantity, session.report.passed) == ("output", False)
