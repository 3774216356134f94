"""Readers of the trace of a job have the steps that it counts, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetpipe.contrib.report.timelines import pipeline_of
from fleetpipe.contrib.why.traced_ops import read_trace
from fleetpipe.engine.trace import Trace
from fleetpipe.mesh.groups import SoleGroup
from fleetpipe.schedules import build
from fleetpipe.schedules.forms.events import figures_of
from tests.engine.test_trace import record


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
