"""The tutorials of other frameworks, as examples: they have the plain network's bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launching import ROOT, Finished

SMALL = ["--layers", "18", "--width", "4", "--steps", "2", "--batch-size", "16"]


@pytest.mark.parametrize("ranks", [None, 4])
def test_the_tutorial_of_colossalai(
    launch: Callable[..., Finished], tmp_path: Path, ranks: int | None
) -> None:
    report = tmp_path / "report.json"
    args = [*SMALL, *([] if ranks else ["--chunks", "2"]), "--report", str(report)]
    job = launch(ROOT / "examples" / "colossalai_resnet.py", ranks, args=args)
    found = json.loads(report.read_text())
    assert found["bit_exact"]
    assert (found["steps"], found["ranks"], found["dp"]) == (2, 2, 2 if ranks else 1)
    assert found["schedule"] == ("1F1B" if ranks else "Interleaved1F1B")
    # One rank of each replica has the last stage.
    assert [log.count("[Epoch 0") for log in job.logs] == ([0, 2, 0, 2] if ranks else [2])


@pytest.mark.parametrize("ranks", [None, 4])
def test_the_tutorial_of_mindspore(
    launch: Callable[..., Finished], tmp_path: Path, ranks: int | None
) -> None:
    report = tmp_path / "report.json"
    args = [*SMALL, *([] if ranks else ["--schedule", "gpipe"]), "--report", str(report)]
    job = launch(ROOT / "examples" / "mindspore_resnet.py", ranks, args=args)
    found = json.loads(report.read_text())
    assert found["bit_exact"]
    assert (found["steps"], found["ranks"], found["dp"]) == (2, 2, 2 if ranks else 1)
    assert found["schedule"] == ("1F1B" if ranks else "FThenB")
    # The first rank of the job prints the sum over the micro-batches.
    lines = [line for line in job.logs[0].splitlines() if line.startswith("epoch: 1 step: 2,")]
    assert [float(line.rpartition(" ")[2]) for line in lines] == found["pipeline_loss"][1:]
    assert not any("epoch: 1" in log for log in job.logs[1:])
