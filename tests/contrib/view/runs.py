"""Folders of runs for tests: lines as ``MetricsLogger`` writes them, and a tiny run that does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fleetpipe.schedules import build

#: A name that would be a part of the page, were it not escaped.
EVIL = "<script>alert('&')</script>"


def written(folder: Path, rows: list[dict[str, Any]], **about: Any) -> Path:
    """Writes a folder with these rows, and a ``run.json`` where there is something to tell."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    if about:
        (folder / "run.json").write_text(json.dumps(about), encoding="utf-8")
    return folder


def row(step: int, loss: float, phase: str = "train", **values: Any) -> dict[str, Any]:
    """A row as MetricsLogger writes it, an epoch being ten steps."""
    return {
        "step": step,
        "epoch": (step - 1) // 10,
        "phase": phase,
        "loss": loss,
        **values,
        "time": 1.7e9 + step,
    }


def schedule(name: str = "1F1B", ranks: int = 2, micro_batches: int = 4) -> dict[str, str]:
    """The schedule's part of a ``run.json``."""
    return {"name": name, "text": str(build(name, ranks=ranks, micro_batches=micro_batches))}
