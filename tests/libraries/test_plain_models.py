"""PaddleNLP's plain models as pipelines: captured, proved and trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launching import run

WORKER = Path(__file__).with_name("plain_worker.py")


@pytest.mark.parametrize(
    ("model", "rounded"),
    # T5's relative positions are used on both stages: that sum is made stage by stage.
    [("llama", 0), ("bert", 0), ("t5", 1)],
)
def test_a_plain_model_is_captured_and_trains(model: str, rounded: int, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    run(WORKER, None, folder=tmp_path, args=[model, str(file)], timeout=200)
    found = json.loads(file.read_text())
    assert found["gradients"] > 30
    assert len(found["rounded"]) <= rounded
    assert all(error < 1e-6 for error in found["rounded"].values())
    assert found["losses"][-1] < found["losses"][0]
