"""Readers of a job's trace have the steps that it counts, and say how they were measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fleetpipe.cli import main
from fleetpipe.contrib.view.traced_ops import pipeline_of, read_trace
from fleetpipe.engine.trace import Trace
from fleetpipe.mesh.groups import SoleGroup
from fleetpipe.schedules import build
from fleetpipe.schedules.forms.trace import figures_of
from tests.engine.test_observer import record
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


@pytest.mark.parametrize("kept", [4, 3])
def test_a_trace_that_was_recorded_is_read(tmp_path: Path, kept: int) -> None:
    schedule = build("1F1B", ranks=2, micro_batches=2)
    trace = Trace(tmp_path, schedule, range(2), SoleGroup(), most_steps=kept)
    record(trace, schedule, {40: (1, 1), 50: (1, 1), 51: (1, 1), 52: (1, 90)})
    trace.write()
    pipeline = pipeline_of(None, tmp_path / "trace.json")
    assert pipeline is not None
    assert pipeline.numbers == [40, 50, 51, 52][-kept:]
    assert sorted({one.step for one in read_trace(tmp_path / "trace.json")}) == pipeline.numbers
    assert figures_of(pipeline.measured).bubble_rate == pytest.approx(1 / 3)
