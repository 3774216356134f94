"""Whatever JSON the files of a run hold, a page and the reader of a trace take or refuse it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fleetpipe.contrib.report import run_contents
from fleetpipe.contrib.why import read_trace
from tests.ground.test_json_value import DATA, Format, checks_of, stored

pytestmark = pytest.mark.once


def run_with(name: str) -> Callable[[Path], object]:
    """Reads the report of a recorded run, one file of which is another."""

    def read_run(path: Path) -> object:
        folder = path.parent / "run"
        if not folder.exists():
            shutil.copytree(DATA / "run", folder)
        shutil.copy(path, folder / name)
        return run_contents.read(folder)

    return read_run


FORMATS = [
    Format("trace.json", stored("run/trace/trace.json"), read_trace),
    Format("run.json", stored("run/run.json"), run_with("run.json"), False),
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
