"""Other frameworks' tutorials, as examples, and the ResNet with ``fleetpipe.Model``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fixtures import Launch
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


EXAMPLE = ROOT / "examples" / "resnet_cifar.py"


def run(launch: Launch, folder: Path, nproc: int | None, *args: str) -> tuple[Any, str]:
    report = folder / f"{nproc}.json"
    words = ["--layers", "18", "--width", "8", *args, "--report", str(report)]
    job = launch(EXAMPLE, nproc, args=words)
    return json.loads(report.read_text()), job.logs[0]


def test_it_learns_and_ranks_change_no_bit(launch: Launch, tmp_path: Path) -> None:
    alone, log = run(launch, tmp_path, None, "--epochs", "1")
    assert alone["accuracy"] > 0.7
    assert len(alone["losses"]) == 47
    assert log.count("loss is") == 4
    assert "[Epoch 0 / Test]: Loss = " in log
    ranks, _ = run(launch, tmp_path, 2, "--epochs", "1", "--steps", "4")
    assert ranks["losses"] == alone["losses"][:4]
