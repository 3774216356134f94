"""The tutorials of other frameworks, as examples: they have the plain network's bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.launching import ROOT, Finished

SMALL = ["--layers", "18", "--width", "4", "--steps", "2", "--batch-size", "16", "--dp", "2"]


def trained(launch: Callable[..., Finished], folder: Path, example: str) -> tuple[Any, list[str]]:
    """Runs an example on two stages and two replicas; returns its report and the ranks' logs."""
    report = folder / "report.json"
    args = [*SMALL, "--report", str(report)]
    job = launch(ROOT / "examples" / example, 4, args=args)
    found = json.loads(report.read_text())
    assert found["bit_exact"]
    assert (found["steps"], found["ranks"], found["dp"]) == (2, 2, 2)
    return found, list(job.logs)


def test_the_tutorial_of_colossalai(launch: Callable[..., Finished], tmp_path: Path) -> None:
    _, logs = trained(launch, tmp_path, "colossalai_resnet.py")
    # One rank of each replica has the last stage.
    assert [log.count("[Epoch 0") for log in logs] == [0, 2, 0, 2]


def test_the_tutorial_of_mindspore(launch: Callable[..., Finished], tmp_path: Path) -> None:
    found, logs = trained(launch, tmp_path, "mindspore_resnet.py")
    # The first rank of the job prints the sum over the micro-batches.
    lines = [line for line in logs[0].splitlines() if line.startswith("epoch: 1 step: 2,")]
    assert [float(line.rpartition(" ")[2]) for line in lines] == found["pipeline_loss"][1:]
    assert not any("epoch: 1" in log for log in logs[1:])
