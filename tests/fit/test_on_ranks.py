"""``fit`` on several ranks beside one process: losses and metrics are equal on every rank."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.launching import ROOT, Finished

WORKER = ROOT / "tests" / "fit" / "fit_worker.py"

Launch = Callable[..., Finished]


def reports(launch: Launch, folder: Path, nproc: int | None, dp: int) -> list[Any]:
    home = folder / f"{nproc}-{dp}"
    home.mkdir()
    launch(WORKER, nproc, args=[str(home), str(dp), "2"])
    return [json.loads(file.read_text()) for file in sorted(home.glob("rank*.json"))]


def saved(folder: Path) -> dict[str, Any]:
    """What ``Model.save`` wrote, parameters and state of the optimizer in one."""
    state: dict[str, Any] = {}
    for ending in ("pdparams", "pdopt"):
        state.update(pickle.loads((folder / f"saved.{ending}").read_bytes()))
    return state


def test_every_rank_sees_what_one_process_sees(launch: Launch, tmp_path: Path) -> None:
    (alone,) = reports(launch, tmp_path, None, 1)
    assert len(alone["train"]) == 18
    assert alone["rate"] == 0.1 * 0.5**2
    assert len(alone["outputs"]) == 45
    assert reports(launch, tmp_path, 2, 1) == [alone] * 2
    alone_visual, visual = (
        json.loads((tmp_path / name / "visual.json").read_text()) for name in ("None-1", "2-1")
    )
    assert visual == alone_visual
    assert [row for row in visual if row[0] == "train/loss"] == [
        ["train/loss", step, logs["loss"][0]] for step, logs in enumerate(alone["train"], 1)
    ]
    files = saved(tmp_path / "None-1")
    assert str(files) == str(saved(tmp_path / "2-1"))
    first, *others = reports(launch, tmp_path, 4, 2)
    assert others == [first] * 3
    for mine, other in zip(first["train"] + first["eval"], alone["train"] + alone["eval"]):
        assert np.allclose(mine.pop("loss"), other.pop("loss"), atol=1e-5)
        assert mine == other
    assert np.allclose(first["outputs"], alone["outputs"], atol=1e-4)
    of_replicas = saved(tmp_path / "4-2")
    assert list(of_replicas) == list(files)
    arrays = [name for name, value in files.items() if isinstance(value, np.ndarray)]
    assert len(arrays) == 12
    assert all(np.allclose(of_replicas[name], files[name], atol=1e-4) for name in arrays)
