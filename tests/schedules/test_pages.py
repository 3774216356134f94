"""What the files and pages of the families show is what the schedules are."""

from __future__ import annotations

import runpy
from importlib import import_module
from inspect import cleandoc
from pathlib import Path

import pytest

from fleetpipe.schedules import names
from tests.schedules.grids import GRIDS, grid

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "schedules"


@pytest.mark.parametrize("family", GRIDS)
def test_the_grids_are_the_schedules(family: str) -> None:
    module = import_module(f"fleetpipe.schedules.families.{family}")
    opening = cleandoc(module.__doc__ or "").replace("\n    ", "\n")
    page = (PAGES / f"{family}.md").read_text(encoding="utf-8")
    for drawn in GRIDS[family]:
        assert grid(*drawn) in opening
        assert grid(*drawn) in page


def test_every_schedule_has_its_grid() -> None:
    drawn = [name for grids in GRIDS.values() for name, _, _ in grids]
    assert sorted(drawn) == sorted(name for name in names() if name != "auto")


def test_the_table_is_what_the_simulator_says() -> None:
    table = runpy.run_path(str(ROOT / "benchmarks" / "compare_schedules.py"))["table"]
    assert table(4, 16) in (PAGES / "choosing.md").read_text(encoding="utf-8")
