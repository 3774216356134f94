"""What evaluation and prediction return is compared with the single model's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from paddle import nn

from fleetpipe import parity
from fleetpipe.dygraph import PipelineLayer
from fleetpipe.dygraph.batch import dygraph_stage, outputs
from fleetpipe.dygraph.train import pipeline_parallel, training_batch
from fleetpipe.fleet.meta_parallel import LayerDesc
from tests.fixtures import Patch
from tests.parity.defects import FORMS, differences
from tests.pipelines import batch, job, mlp_layers, model_in_job, pipeline, sgd

CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "loss": lambda session, rows: session.eval_batch([x[:rows] for x in batch()], True),
    "outputs": lambda session, rows: session.eval_batch([x[:rows] for x in batch()]),
    "prediction": lambda session, rows: session.predict_batch(batch()[0][:rows]),
}


def evaluated(call: Any, rows: int = 7, **options: Any) -> parity.Report:
    with model_in_job(2, **options, layers=[*mlp_layers(), LayerDesc(nn.Dropout, 0.5)]) as model:
        session = parity.begin(model, sgd(model))
        session.step(batch())
        call(session, rows)
        session.step(batch())
        assert (session.report.steps, session.report.evaluations) == (2, 1)
        return session.report


@pytest.mark.parametrize("rows", [8, 7, 1])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_right_evaluations_pass_whatever_their_rows(call: Any, rows: int) -> None:
    report = evaluated(call, rows)
    assert report.passed, report.verdict()
    assert "compared 2 steps and 1 evaluations" in report.verdict()
    assert evaluated(call, rows, loss_reduction="sum").passed


def test_a_wrong_mean_of_the_evaluation_is_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(training_batch, "ragged_weights", lambda *_: None)
    report = evaluated(CALLS["loss"])
    assert differences(report) == [("loss", "eval_batch", 1)]
    assert "step 1: loss of eval_batch differs" in report.verdict()


def test_outputs_in_another_order_are_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(dygraph_stage, "sorted", lambda x: sorted(x)[::-1], raising=False)
    name = "eval_batch, micro-batch [0]"
    assert ("output", name, 1) in differences(evaluated(CALLS["outputs"]))
    assert ("output", "predict_batch", 1) in differences(evaluated(CALLS["prediction"]))


def test_outputs_that_are_joined_wrongly_are_found(monkeypatch: Patch) -> None:
    monkeypatch.setattr(
        pipeline_parallel, "join_outputs", lambda values: outputs.join_outputs(values[:-1])
    )
    assert differences(evaluated(CALLS["prediction"])) == [("output", "predict_batch", 1)]


def test_an_evaluation_in_training_mode_names_the_first_layer(monkeypatch: Patch) -> None:
    monkeypatch.setattr(PipelineLayer, "eval", lambda self: None)
    with job(2):
        model = pipeline(
            [LayerDesc(nn.Linear, 6, 8), LayerDesc(nn.BatchNorm1D, 8), LayerDesc(nn.Linear, 8, 4)]
        )
        session = parity.begin(model, sgd(model))
        session.eval_batch(batch(), True)
    assert differences(session.report)[0] == ("output", "1, call 0 of eval_batch", 0)
    assert ("loss", "eval_batch", 0) in differences(session.report)


@pytest.mark.parametrize("form", ["lists", "an iterator", "a preprocessor of an iterator"])
def test_an_evaluation_takes_every_form(form: str) -> None:
    with model_in_job(2) as model:
        session = parity.begin(model, sgd(model))
        session.eval_batch(FORMS[form](*batch()), True)
    assert session.report.passed, session.report.verdict()
