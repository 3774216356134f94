"""The cut that is chosen by cost."""

from __future__ import annotations

from typing import Any

import paddle
import pytest
from paddle import nn

import fleetpipe
from fleetpipe.capture.cutting.auto import Choice, chosen, places
from fleetpipe.capture.cutting.costs import NodeCost, measured
from fleetpipe.capture.cutting.cuts import AtCall
from fleetpipe.capture.tracing.capturing import Capturing
from fleetpipe.capture.tracing.signature import signature_of
from fleetpipe.errors import ConfigError, PartitionError
from tests.capture.beside import images, trained
from tests.capture.models import UNet
from tests.jobs import job


class Norms(nn.Layer):  # type: ignore[misc]
    """A batch norm that is called at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1D(3)
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.last = nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        return self.last(self.norm(self.b(self.a(self.norm(x)).tanh())) * 2)


def of_linears(seconds: list[float], stages: int, **options: Any) -> Choice:
    """Chooses a cut of linear layers that take so long; each holds and has one megabyte."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in seconds))
    capturing = Capturing(model, paddle.ones([2, 4]))
    look = signature_of(capturing.example)
    costs = [NodeCost(s / 2, s / 2, 10**6, 10**6) for s in seconds]
    return chosen(capturing(look, True), capturing(look, False), costs, stages, **options)


def test_the_slowest_stage_is_as_fast_as_can_be() -> None:
    found = of_linears([4, 1, 1, 1, 3, 2], 3)
    assert found.borders == (AtCall("1"), AtCall("4"))
    # What the last two receive, and its gradient: 32 bytes.
    crossing = 2 * (3e-5 + 32 * 3e-10)
    assert found.seconds == pytest.approx((4, 3 + crossing, 5 + crossing))
    assert found.bottleneck == max(found.seconds)
    assert found.bound == 4


def test_a_limit_of_memory_moves_the_cut() -> None:
    # 4 copies of the parameters; the first stage holds two forwards, the second one.
    assert of_linears([1, 1, 1, 5], 2).borders == (AtCall("3"),)
    assert of_linears([1, 1, 1, 5], 2, memory_limit=12e6).borders == (AtCall("2"),)
    with pytest.raises(PartitionError, match="fit into memory"):
        of_linears([1, 1, 1, 5], 2, memory_limit=9e6)


def test_no_cut_parts_the_calls_of_what_keeps_running_statistics() -> None:
    capturing = Capturing(Norms(), paddle.randn([4, 3]))
    look = signature_of(capturing.example)
    training, evaluation = capturing(look, True), capturing(look, False)
    # norm, a, tanh, b, norm again, the product, last.
    found, refused = places(training, evaluation)
    assert list(found) == [5, 6]
    assert set(refused) == {1, 2, 3, 4}
    assert all("'norm._mean' is used on both sides" in reason for reason in refused.values())


def test_each_node_is_measured_and_the_model_stays_as_it_was() -> None:
    model = UNet()
    capturing = Capturing(model, images(2, 16)[0])
    training = capturing(signature_of(capturing.example), True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    costs = measured(capturing, training)
    assert len(costs) == len(training.nodes)
    assert all(cost.forward > 0 for cost in costs)
    assert sum(cost.parameters for cost in costs) == sum(
        4 * t.size for t in model.state_dict().values()
    )
    for name, tensor in model.state_dict().items():
        assert paddle.equal_all(tensor, before[name]), name
    assert all(parameter.grad is None for parameter in model.parameters())


def test_auto_is_what_a_pipeline_does_by_default() -> None:
    with job(2):
        done = trained(UNet, images(8, 16), loss_fn=lambda out, _: out.mean(), steps=1)
    assert done.differing == []
    assert done.pipe.choice.bottleneck >= done.pipe.choice.bound
    assert "no cut below" in str(done.pipe.choice)


def test_auto_needs_to_know_of_how_many_stages() -> None:
    with pytest.raises(ConfigError, match="needs the number of stages"):
        fleetpipe.pipeline(UNet(), images(2, 16)[0])
