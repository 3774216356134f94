"""Whatever JSON the files of a run hold, it has a page; the reader of a trace may refuse it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetpipe.contrib.view import run_folder
from fleetpipe.contrib.view.showing.page import page
from fleetpipe.contrib.view.traced_ops import read_trace
from tests.ground.test_json_value import DATA, Format, checks_of, stored

pytestmark = pytest.mark.once


def run_with(name: str) -> Callable[[Path], object]:
    """Writes the page of a recorded run, one file of which is another."""

    def read_run(path: Path) -> object:
        folder = path.parent / "run"
        if not folder.exists():
            shutil.copytree(DATA / "run", folder)
        shutil.copy(path, folder / name)
        return page(run_folder.read(folder))

    return read_run


FORMATS = [
    Format("trace.json", stored("run/trace/trace.json"), read_trace),
    Format(
        "trace.json", stored("run/trace/trace.json"), run_with("trace/trace.json"), refuses=False
    ),
    Format("run.json", stored("run/run.json"), run_with("run.json"), refuses=False),
    *(
        Format(
            name,
            json.loads((DATA / "run" / name).read_text().splitlines()[0]),
            run_with(name),
            refuses=False,
        )
        for name in ("metrics.jsonl", "lives.jsonl")
    ),
]

test_any_value_is_read_or_refused, test_what_is_no_json_is_refused = checks_of(FORMATS)
