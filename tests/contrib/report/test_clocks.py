"""The page and the sentence of a job on a device say how its actions were measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fleetpipe.cli import main
from fleetpipe.contrib.report.timelines import pipeline_of
from tests.fixtures import LogCapture, Patch
from tests.gpu.late_device import QUICK, SLOW, late_device, late_model
from tests.gpu.pretending import pretend
from tests.pipelines import batch, sgd


def test_a_trace_has_what_actions_take_and_says_how(
    tmp_path: Path, caplog: LogCapture, capsys: Any, monkeypatch: Patch
) -> None:
    pretend(monkeypatch)
    device = late_device(monkeypatch)
    with late_model(device, trace=tmp_path) as model:
        for _ in range(2):
            model.train_batch(batch(2), sgd(model))
    pipeline = pipeline_of(None, tmp_path / "trace.json")
    assert pipeline is not None
    taken = {event.name: event.end - event.start for event in pipeline.measured}
    for name, seconds in {"F0.1": QUICK, "F1.1": SLOW, "B1.1": 2 * SLOW, "B0.1": 2 * QUICK}.items():
        assert taken[name] == pytest.approx(seconds), name
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path), "-o", str(page)]) == 0
    capsys.readouterr()
    assert main(["why", str(tmp_path)]) == 0
    assert main(["why", "--json", str(tmp_path)]) == 0
    sentence, *_, figures = capsys.readouterr().out.splitlines()
    assert json.loads(figures)["device"] == "gpu"
    for text in (caplog.text, page.read_text(encoding="utf-8"), sentence):
        assert "On a gpu each action waited until its work was done" in text
