"""Parity names the edge of a slice whose gradient is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from fleetpipe import parity
from fleetpipe.dygraph.batch import dygraph_stage
from tests.contrib.slices import sliced
from tests.fixtures import Patch
from tests.parity.test_edges import edge_of
from tests.pipelines import job, pipeline, sgd


@pytest.mark.parametrize("slices", [3, (3, 1, 3)])
def test_an_edge_is_named_with_the_slice(slices: Any, monkeypatch: Patch) -> None:
    backward = dygraph_stage.DygraphStage.backward

    def backward_wrong(self: Any, number: int, unit: int, grads: Any) -> Any:
        sent = backward(self, number, unit, grads)
        wrong = number == 1 and unit == 7
        return {e: tuple(g * 1.01 for g in gs) for e, gs in sent.items()} if wrong else sent

    def run() -> parity.Report:
        with job(3, schedule="Seq1F1B", slices=slices):
            model = pipeline(sliced.layers(dropout=0.1), loss_fn=sliced.loss)
            session = parity.begin(model, sgd(model))
            session.step(sliced.batch(8, 7))
            return session.report

    assert run().bit_exact
    monkeypatch.setattr(dygraph_stage.DygraphStage, "backward", backward_wrong)
    report = run()
    assert edge_of(report) == "edge 0 -> 1, value, micro-batch 2, slice 1"
    first = report.first_of_a_layer
    assert first is not None
    assert first.name.startswith(("0.", "1."))
