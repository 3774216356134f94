"""The notebook of docs/ runs top to bottom in one process, and holds what its cells show."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import paddle
import pytest

from fleetpipe.job.job import current_job
from tests.fixtures import Capture, Patch
from tests.launching import ROOT

pytestmark = pytest.mark.once

_spec = importlib.util.spec_from_file_location("notebook", ROOT / ".ci" / "notebook.py")
assert _spec is not None
assert _spec.loader is not None
NOTEBOOK = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(NOTEBOOK)
CELLS = json.loads(NOTEBOOK.NOTEBOOK.read_text(encoding="utf-8"))["cells"]
#: A loss to four digits, and what stages cost: other processors, and versions of Paddle, differ.
OF_THIS_MACHINE = {"cell-12", "cell-16"}
#: A table with the name of a function, which is ``_tanh`` on 2.6.2.
OF_THIS_VERSION: set[str] = {"cell-6"} if paddle.__version__.startswith("2.") else set()
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]


def test_the_cells_run_in_their_order(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = list(NOTEBOOK.run(CODE, names))
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
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")
    for cell, outputs in zip(CODE, shown):
        texts, kept = (
            ["".join(one["text"]) for one in each if "text" in one]
            for each in (outputs, cell["outputs"])
        )
        if cell["id"] not in OF_THIS_MACHINE | OF_THIS_VERSION:
            assert texts == kept, f"run .ci/notebook.py: {cell['id']} shows something else"
    text = json.dumps(shown)
    assert "losses equal to the last bit: True" in text
    assert "rank 0  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3---" in text


def test_its_pictures_are_light() -> None:
    pictures = [
        "".join(output["data"]["image/svg+xml"])
        for cell in CODE
        for output in cell["outputs"]
        if "data" in output
    ]
    assert len(pictures) == 2
    for picture in pictures:
        assert ">rank 1</text>" in picture
        assert len(picture) < 40_000
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)
