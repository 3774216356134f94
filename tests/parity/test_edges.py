"""A gradient that is lost between two stages is found by its edge; a stale buffer by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleetpipe import fleet, parity
from fleetpipe.dygraph.batch import dygraph_stage
from fleetpipe.fleet.meta_parallel import LayerDesc
from tests.fixtures import Patch
from tests.parity.defects import differences
from tests.pipelines import batch, job, mlp_layers, model_in_job, pipeline, sgd


class Branch(nn.Layer):
    """Returns two values that both go on, under the name of a dict or as a tuple."""

    def __init__(self, named: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.named = named

    def forward(self, value: Any) -> Any:
        new, old = self.linear(value), value * 1
        return {"new": new, "old": old} if self.named else (new, old)


class Merge(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, value: Any) -> Any:
        new, old = value.values() if isinstance(value, dict) else value
        return self.linear(new) * nn.functional.tanh(old)


def passed_on(value: Any) -> Any:
    return value


def through(value: Any) -> Any:
    new, old = value
    return new + nn.functional.tanh(old), old


def branching_layers(named: bool = False) -> list[Any]:
    return [
        LayerDesc(nn.Linear, 6, 8),
        nn.functional.tanh,
        LayerDesc(Branch, named),
        passed_on,
        LayerDesc(Merge),
        nn.functional.tanh,
        LayerDesc(nn.Linear, 8, 8),
        LayerDesc(nn.Linear, 8, 4),
    ]


def trained(layers: list[Any], **options: Any) -> parity.Report:
    with model_in_job(4, **options, layers=layers) as model:
        session = parity.begin(model, sgd(model))
        session.step(batch())
        return session.report


def edge_of(report: parity.Report) -> str:
    first = report.failures[0]
    assert first.quantity == "gradient"
    return first.name


@pytest.fixture
def changed(monkeypatch: Patch) -> Callable[..., None]:
    """Has the gradients that a stage sends back over its edge changed."""

    def change(consumer: int, wrong: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> None:
        backward = dygraph_stage.DygraphStage.backward

        def backward_wrong(self: Any, number: int, micro_batch: int, grads: Any) -> Any:
            sent = backward(self, number, micro_batch, grads)
            return {edge: wrong(gs) for edge, gs in sent.items()} if number == consumer else sent

        monkeypatch.setattr(dygraph_stage.DygraphStage, "backward", backward_wrong)

    return change


@pytest.mark.parametrize("schedule_mode", ["1F1B", "ZBH1"])
@pytest.mark.parametrize("consumer", [1, 2, 3])
def test_a_gradient_changed_on_an_edge_is_found_by_the_edge(
    consumer: int, schedule_mode: str, changed: Any
) -> None:
    layers = branching_layers()
    assert trained(layers, schedule=schedule_mode).passed
    changed(consumer, lambda grads: tuple(grad * 1.001 for grad in grads))
    report = trained(layers, schedule=schedule_mode)
    assert edge_of(report).startswith(f"edge {consumer - 1} -> {consumer}, value")
    first_layer = {1: "0.", 2: "2.linear.", 3: "4.linear."}[consumer]
    assert report.first_of_a_layer is not None
    assert report.first_of_a_layer.name.startswith(first_layer)
    first, layer = report.verdict().splitlines()[1:3]
    assert f"gradient of edge {consumer - 1} -> {consumer}, value" in first
    assert f"parity: first layer: step 0: gradient of {first_layer}" in layer


@pytest.mark.parametrize("named", [False, True])
def test_a_gradient_lost_on_an_edge_is_found_by_its_value(named: bool, changed: Any) -> None:
    changed(2, lambda grads: (grads[0], None))
    path = "['old']" if named else "[1]"
    report = trained(branching_layers(named))
    assert edge_of(report) == f"edge 1 -> 2, value{path} (lost), micro-batch 0"
    assert report.failures[0].relative == 1
    # What is lost on one edge is missing on those before.
    edges = [name for _, name, _ in differences(report) if name.startswith("edge ")]
    assert edges == [edge_of(report), "edge 0 -> 1, value, micro-batch 0"]


def test_a_gradient_that_arrives_and_is_not_used_is_found(monkeypatch: Patch) -> None:
    roots = dygraph_stage._roots

    def forgetful(tensors: Any, grads: Any) -> Any:
        found, theirs = roots(tensors, grads)
        return found[:1], theirs[:1]

    monkeypatch.setattr(dygraph_stage, "_roots", forgetful)
    assert edge_of(trained(branching_layers())) == "edge 1 -> 2, value[1] (lost), micro-batch 0"


def test_a_value_that_passes_through_a_stage_is_found_at_its_edge(changed: Any) -> None:
    layers = branching_layers()
    layers[3] = through
    changed(2, lambda grads: (grads[0], None))
    with model_in_job(4, layers=layers, seg_method=[0, 3, 4, 6]) as model:
        session = parity.begin(model, sgd(model))
        session.step(batch())
    edges = [name for _, name, _ in differences(session.report) if name.startswith("edge ")]
    assert edges == [
        "edge 1 -> 2, value[1] (lost), micro-batch 0",
        "edge 0 -> 1, value[1], micro-batch 0",
    ]


def test_a_gradient_wrong_within_a_stage_is_no_edges_fault(monkeypatch: Patch) -> None:
    with model_in_job(4, layers=branching_layers()) as model:
        model.layers.state_dict()["4.linear.weight"].register_hook(lambda grad: grad * 2)
        session = parity.begin(model, sgd(model))
        session.step(batch())
    assert edge_of(session.report) == "4.linear.weight"
    assert not any(name.startswith("edge") for _, name, _ in differences(session.report))
    assert "first layer" not in session.report.verdict()


def test_a_gradient_lost_between_chunks_of_a_rank_is_found(changed: Any) -> None:
    changed(2, lambda grads: tuple(np.float32(0) * grad for grad in grads))
    with job(2, schedule="ZBV"):
        model = pipeline(branching_layers(), num_virtual_pipeline_stages=2)
        session = parity.begin(model, sgd(model))
        session.step(batch())
    assert edge_of(session.report).startswith("edge 1 -> 2, value")


def test_a_late_micro_batch_is_named(monkeypatch: Patch, changed: Any) -> None:
    count = iter(range(100))
    changed(1, lambda grads: tuple(g * (2.0 if next(count) == 2 else 1.0) for g in grads))
    assert edge_of(trained(branching_layers())) == "edge 0 -> 1, value, micro-batch 2"


def test_the_diagnosis_leaves_nothing_behind(changed: Any) -> None:
    """A difference of one step alone is one of that step's gradients and later parameters."""
    once = iter([True])
    changed(1, lambda grads: tuple(g * (1.5 if next(once, False) else 1.0) for g in grads))
    layers = branching_layers()
    layers[3] = LayerDesc(nn.BatchNorm1D, 8)
    layers[2] = LayerDesc(nn.Linear, 8, 8)
    layers[4] = LayerDesc(nn.Linear, 8, 8)
    with model_in_job(4, layers=layers) as model:
        session = parity.begin(
            model,
            fleet.distributed_optimizer(paddle.optimizer.SGD(0.0, parameters=model.parameters())),
        )
        for seed in range(3):
            session.step(batch(seed=seed))
    assert {step for _, _, step in differences(session.report)} == {0}
    assert session.report.pipeline_loss == session.report.single_loss


class Counting(nn.Layer):
    """Has two buffers that no state dict has, of which one is made in the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", paddle.zeros([1]), persistable=False)

    def forward(self, value: Any) -> Any:
        self.calls = self.calls + 1
        self.largest = value.detach().max()
        return self.linear(value) + 0.01 * self.calls


def counting_layers() -> list[Any]:
    layers = mlp_layers()
    return [*layers[:3], LayerDesc(Counting), *layers[3:]]


@pytest.mark.parametrize("name", ["calls", "largest"])
def test_a_stale_buffer_that_is_not_saved_is_found(name: str) -> None:
    with model_in_job(3, layers=counting_layers()) as model:
        session = parity.begin(model, sgd(model))
        session.step(batch())
        assert session.report.passed, session.report.verdict()
        (layer,) = (part for part in model.layers.sublayers() if isinstance(part, Counting))
        layer.register_forward_post_hook(lambda *_: setattr(layer, name, paddle.zeros([1])))
        session.step(batch(seed=1))
    assert ("buffer", f"3.{name}", 1) in differences(session.report)
    assert not session.report.bit_exact


def test_the_reference_begins_with_the_pipelines_buffers() -> None:
    with model_in_job(3, layers=counting_layers()) as model:
        model.eval_batch(batch(), compute_loss=True)
        session = parity.begin(model, sgd(model))
        session.step(batch())
    assert session.report.passed, session.report.verdict()
