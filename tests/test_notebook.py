"""The notebook of docs/ runs top to bottom in one process, and holds no outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fleetpipe.job.job import current_job
from tests.launching import ROOT

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]


def test_the_cells_run_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in CODE:
        exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, {cell['id']}", "exec"), names)
    assert current_job() is None
    # 1F1B on p ranks: (p - 1) / (m + p - 1) of the time is lost.
    assert names["bubbles"] == pytest.approx({m: 1 / (m + 1) for m in (1, 2, 4, 8, 16, 32)})
    assert names["timeline"].peak_activations == (2, 1)
    assert len(names["losses"].values) == 150
    assert names["losses"].values == names["single_losses"]
    assert names["differences"] == [0.0] * 8
    assert names["accuracy"] > 0.95
    assert [len(names["measured"][kind]) for kind in ("forward", "input_grad")] == [2, 2]
    assert 0 < names["expected"].bubble_rate < 1
    shown = capsys.readouterr().out
    assert "losses equal to the last bit: True" in shown
    assert "rank 0  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3---" in shown
    assert list(tmp_path.iterdir()) == []


def test_what_is_stored_is_what_was_written() -> None:
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CODE)
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)
