"""The page of several runs: all curves in the same charts, final figures, and what differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleetpipe.cli import main
from fleetpipe.contrib.view.reading.run_folder import read
from fleetpipe.contrib.view.showing.page import comparison, short_names
from tests.contrib.view.runs import EVIL, row, schedule, written
from tests.contrib.view.showing.test_page import Parsed

pytestmark = pytest.mark.no_paddle


def run(folder: Path, factor: float, name: str, **figures: Any) -> Path:
    rows = [row(step, factor / step, **figures) for step in (1, 2, 4)]
    rows.append(row(4, 3 * factor, "eval", acc=factor / 4))
    config = {"model": {"width": 8}, "rate": factor, EVIL: EVIL}
    return written(folder, rows, schedule=schedule(name), config=config)


def test_curves_figures_and_settings_of_two_runs(tmp_path: Path) -> None:
    runs = {
        EVIL: read(run(tmp_path / "a", 1.0, "1F1B")),
        "b": read(run(tmp_path / "b", 2.0, "ZBH1", samples_per_second=50.0)),
    }
    text = comparison(runs, now=1.7e9)
    parsed = Parsed(text)
    assert parsed.open == []
    assert parsed.scripts == 1
    assert parsed.names == []
    assert list(parsed.sections) == ["head", "figures", "settings", "curves", "throughput"]
    loss = parsed.charts[0]["curves"]
    assert [(each["name"], each["colour"], each["ys"]) for each in loss] == [
        (EVIL, 0, [1, 0.5, 0.25]),
        (f"{EVIL}, evaluation", 0, [3]),
        ("b", 1, [2, 1, 0.5]),
        ("b, evaluation", 1, [6]),
    ]
    assert [each["name"] for each in parsed.charts[-1]["curves"]] == ["b"]
    # Captions and headings of columns, then a row for each setting that differs.
    settings = parsed.sections["settings"].partition("setting\n")[2].split()
    assert settings[: settings.index("Smoothing,")] == [
        *(*EVIL.split(), "b", "schedule", "1F1B", "ZBH1", "config.rate", "1", "2")
    ]
    figures = parsed.sections["figures"].split()
    assert {"0.2500", "0.5000", "3.000", "6.000", "50.00"} <= set(figures)


def test_runs_are_named_by_what_tells_them_apart(tmp_path: Path) -> None:
    folders = [tmp_path / "first" / "run", tmp_path / "second" / "run"]
    assert short_names(folders) == ["first/run", "second/run"]
    assert short_names(folders[:1]) == ["run"]


def test_the_command_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(run(tmp_path / name, 1.0, "1F1B")) for name in "ab"]
    page = tmp_path / "page.html"
    assert main(["report", *folders, "-o", str(page)]) == 0
    assert "No setting that the runs recorded." in Parsed(page.read_text()).sections["settings"]
    assert "fleetpipe: b: No step was traced" in capsys.readouterr().err
    assert main(["report", folders[0], folders[0], "-o", str(page)]) == 2
    assert "one folder is given twice" in capsys.readouterr().err
