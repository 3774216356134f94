"""The ResNet with ``fleetpipe.Model``: it learns, and two ranks have the losses of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.fixtures import Launch
from tests.launching import ROOT

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
