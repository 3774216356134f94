"""A split backward in a pipeline: what is left alone, skips, evaluation, memory, the report."""

from __future__ import annotations

import gc
from typing import Any

import paddle
import pytest
from paddle import nn

from fleetpipe.errors import ConfigError
from fleetpipe.fleet.meta_parallel import LayerDesc
from tests.dygraph.backward.leaves import Parent
from tests.pipelines import batch, job, mlp_layers, model_in_job, pipeline, sgd, train


@pytest.mark.parametrize("schedule", ["1F1B", "FThenB", "Interleaved1F1B"])
def test_schedules_with_a_full_backward_are_left_alone(schedule: str) -> None:
    seen = []

    class Looks(nn.Linear):
        def forward(self, x: Any) -> Any:
            seen.append("forward" in self.__dict__)
            return super().forward(x)

    with job(2, 4, schedule):
        model = pipeline([LayerDesc(Looks, 6, 6) for _ in range(3)] + [LayerDesc(nn.Linear, 6, 4)])
        model.train_batch(batch(), sgd(model))
        assert seen
        assert not any(seen)
        assert model.deferral_report().reasons == {}
        assert str(model.deferral_report()) == f"{schedule}: no backward was split yet"


class Branch(nn.Linear):
    """Hands on what it received beside what it computes."""

    def forward(self, x: Any) -> Any:
        return super().forward(x), x


class Merge(nn.Linear):
    """Takes both."""

    def forward(self, both: Any) -> Any:
        return super().forward(both[0]) * nn.functional.tanh(both[1])


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_skip_connection_across_a_border_has_the_bits_of_a_whole_backward(ranks: int) -> None:
    layers = [
        *(LayerDesc(nn.Linear, 6, 8), nn.functional.tanh, LayerDesc(Branch, 8, 8)),
        *(lambda both: both, LayerDesc(Merge, 8, 8), nn.functional.tanh),
        *(LayerDesc(nn.Linear, 8, 8), LayerDesc(nn.Linear, 8, 4)),
    ]
    assert train(layers, ranks, "ZBH1") == train(layers, 1)


class Chosen(nn.Layer):
    """Two experts, of which one gets no rows, as where nobody chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return self.one(x) + self.one(x[:0]).sum() + self.other(x[:0]).sum()


@pytest.mark.skipif(paddle.__version__ < "3", reason="2.6.2 refuses a product without rows")
def test_a_linear_without_rows_has_the_bits_of_a_whole_backward() -> None:
    layers = [LayerDesc(nn.Linear, 6, 8), *[LayerDesc(Chosen)] * 2, LayerDesc(nn.Linear, 8, 4)]
    plain = train(layers, 1, gradients=True)
    assert "1.other.weight" in plain.gradients
    assert train(layers, 2, "ZBH1", gradients=True) == plain


def test_everything_is_dropped_after_w() -> None:
    from fleetpipe.paddle_api.device import allocated_bytes

    with model_in_job(2, 8, "ZBH1", layers=mlp_layers(hidden=64)) as model:
        data = batch(8)
        for _ in range(2):
            model.forward_backward_pipeline(data)
        gc.collect()  # of the tests before this one
        before = allocated_bytes()
        for _ in range(3):
            model.forward_backward_pipeline(data)
        assert allocated_bytes() == before


def test_the_report_says_where_each_gradient_was_computed() -> None:
    layers = [
        LayerDesc(nn.Linear, 6, 4),
        LayerDesc(nn.LayerNorm, 4),
        LayerDesc(Parent),
        LayerDesc(nn.Linear, 4, 4),
    ]
    with model_in_job(2, 4, "ZBV", layers=layers) as model:
        assert "no backward was split yet" in str(model.deferral_report())
        model.train_batch(batch(), sgd(model))
        report = model.deferral_report()
    linears = ("0.weight", "0.bias", "2.linear.weight", "2.linear.bias", "3.weight", "3.bias")
    assert report.deferred == linears
    assert list(report.immediate) == ["1.weight", "1.bias", "2.shift"]
    lines = str(report).splitlines()
    assert lines[0] == "ZBV: the gradients of 6 of 9 parameters are computed in W"
    assert "  1.weight: computed in I: Paddle gives it together" in lines[1]
    assert lines[3].startswith("  2.shift: computed in I: ")
    assert len(lines) == 4


class Patching(nn.Layer):
    """Puts another forward in the place of its sublayer's, in the first call."""

    def __init__(self) -> None:
        super().__init__()
        # So wide that its forward is replaced even where no backward is split.
        self.inner = nn.Linear(4, 256)

    def forward(self, x: Any) -> Any:
        y, forward = self.inner(x), self.inner.forward
        self.inner.forward = lambda x: forward(x) + 1
        return y


@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
def test_another_forward_that_comes_within_a_forward_is_refused(schedule: str) -> None:
    with pytest.raises(ConfigError, match="replace it before the batch"):
        train([*mlp_layers(), LayerDesc(Patching)], schedule=schedule)
