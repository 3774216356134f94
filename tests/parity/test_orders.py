"""Sums in another order than in one graph: parity says where, and holds them to rounding."""

from __future__ import annotations

from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe import fleet, parity
from fleetpipe.dygraph.backward.crossings import Crossing, Meeting, reordered
from fleetpipe.fleet.meta_parallel import LayerDesc
from tests.pipelines import batch, job, pipeline, sgd


class Fork(nn.Layer):
    """Hands on a tensor, and what else it made of it."""

    def __init__(self, extra: int = 1) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)
        self.extra = extra

    def forward(self, x: Any) -> Any:
        h = self.up(x)
        return (h, *(paddle.tanh(h * (k + 1)) for k in range(self.extra)))


class Once(nn.Layer):
    """Uses each tensor once."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, value: Any) -> Any:
        h, *others = value
        return self.down(paddle.tanh(self.up(h)) + sum(others))


class Twice(Once):
    """Uses the first tensor twice, before and after the others' gradients come back."""

    def forward(self, value: Any) -> Any:
        h, *others = value
        deep = self.down(paddle.tanh(self.up(h)))
        return deep + sum(map(self.down, others)) + self.down(paddle.exp(h * 0.1))


class Passes(nn.Layer):
    """Hands everything on, changed or not."""

    def forward(self, value: Any) -> Any:
        h, *others = value
        return (h, *(paddle.sin(other) for other in others))


class Gated(nn.Layer):
    """A cell that uses its state several times, as others do."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(6, 6)

    def forward(self, x: Any) -> Any:
        return self.cell(x, x)[0] + x


def report(
    layers: list[Any],
    schedule: str = "1F1B",
    scale: float = 1.0,
    frozen_until: int = 0,
    **options: Any,
) -> parity.Report:
    with job(len(options.get("seg_method", [0, 1])), schedule=schedule):
        model = pipeline(layers, **{"seg_method": [0, 1], **options})
        session = parity.begin(model, sgd(model))
        model.layers.state_dict()["0.up.weight"].register_hook(lambda grad: grad * scale)
        for step in range(3):
            for name, parameter in model.layers.named_parameters():
                parameter.stop_gradient = name.startswith("0.") and step < frozen_until
            session.step(batch(seed=step))
    return session.report


ANOTHER: dict[str, list[Any]] = {
    "twice after the border": [LayerDesc(Fork), LayerDesc(Twice)],
    "twice before the border": [LayerDesc(Fork, 2), LayerDesc(Once)],
    "two borders on": [LayerDesc(Fork), LayerDesc(Passes), LayerDesc(Twice)],
}


@pytest.mark.parametrize("kind", ANOTHER)
def test_what_meets_in_another_order_is_held_to_rounding_and_told(kind: str) -> None:
    layers = ANOTHER[kind]
    found = report(layers, seg_method=list(range(len(layers))))
    assert found.passed, found.verdict()
    assert found.tolerance == 1e-5
    assert "stage 0 hands on several tensors" in found.orders[0]
    if found.differences:
        assert "sums have another order: stage 0" in found.verdict()


def test_adam_makes_no_more_of_a_last_bit_than_it_is() -> None:
    """Of a gradient below its epsilon Adam makes a step in which the last bits are large."""
    with job(2):
        model = pipeline(ANOTHER["twice before the border"], seg_method=[0, 1])
        optimizer = paddle.optimizer.AdamW(10.0, epsilon=1e-12, parameters=model.parameters())
        session = parity.begin(model, fleet.distributed_optimizer(optimizer))
        for step in range(4):
            session.step(batch(seed=step))
    report = session.report
    quantities = {found.quantity for found in report.differences}
    assert report.passed, report.verdict()
    assert "gradient" in quantities
    assert "parameter" not in quantities
    assert not report.bit_exact


def test_what_meets_only_once_a_layer_is_unfrozen_is_told_then() -> None:
    found = report(ANOTHER["twice after the border"], frozen_until=2)
    assert found.passed, found.verdict()
    assert "stage 0 hands on several tensors" in found.orders[0]


def test_what_goes_to_other_stages_than_the_next_may_be_a_sum() -> None:
    hands_on_two = Crossing((), (Meeting(3, (), (0, 1)),))
    takes_one = Crossing((Meeting(1, (), (0,)),), ())
    assert reordered({0: hands_on_two, 1: takes_one, 2: takes_one}) == [0]


def test_a_wrong_gradient_is_found_there_too() -> None:
    found = report(ANOTHER["twice after the border"], scale=1.001)
    assert not found.passed
    assert found.failures[0].name == "0.up.weight"


@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
def test_two_gradients_have_no_order(schedule: str) -> None:
    found = report([LayerDesc(Fork), LayerDesc(Once)], schedule)
    assert (found.orders, found.tolerance, found.differences) == ([], 0.0, [])


def test_a_split_layer_that_uses_an_input_several_times_is_told() -> None:
    layers = [LayerDesc(Fork, 0), lambda value: value[0], LayerDesc(Gated)]
    layers.append(LayerDesc(nn.Linear, 6, 4))
    assert report(layers, "1F1B", seg_method=[0, 2]).differences == []
    found = report(layers, "ZBH1", seg_method=[0, 2])
    assert found.passed, found.verdict()
    assert found.orders == ["the backward of layer 2.cell is split"]
