"""PaddleNLP's pipelines, unedited, beside its own single-device classes on Paddle alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.launching import ROOT, run
from tests.libraries.models import MODELS

HERE = Path(__file__).parent
#: By form, the chunks of a rank, and how often an attention runs in a micro-batch.
FORMS = {"pp 2": (1, 1), "virtual 2": (2, 1), "recompute": (1, 2)}
PROCESSES = {"one process": None, "two processes": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has each model saved, and the losses of the single ones."""
    folder = tmp_path_factory.mktemp("models")
    run(HERE / "single_worker.py", None, folder=folder, args=[str(folder), *MODELS], timeout=250)
    return folder


@pytest.fixture(scope="module")
def losses(folder: Path) -> dict[str, Any]:
    """The losses of each model: the single one's, and those of each form in each job."""
    for job, processes in PROCESSES.items():
        args = [str(folder), f"{job}.json", *MODELS]
        run(HERE / "pipeline_worker.py", processes, folder=folder, args=args, timeout=250)
    return {job: json.loads((folder / f"{job}.json").read_text()) for job in ("single", *PROCESSES)}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("job", PROCESSES)
@pytest.mark.parametrize("model", MODELS)
def test_a_pipeline_has_the_losses_of_the_single_class(
    losses: dict[str, Any], model: str, job: str, form: str, record_property: Any
) -> None:
    trained = losses[job][model][form]
    assert (trained["chunks"], trained["runs"]) == FORMS[form]
    expected, found = losses["single"][model], trained["losses"]
    assert len(found) == len(expected)
    gap = max(abs(one - other) for one, other in zip(found, expected))
    record_property("gap", gap)
    assert gap < 1e-5
    # It has learned something: otherwise the same losses would say little.
    assert found[-1] < found[0] - 0.1


@pytest.mark.timeout(900)
def test_the_script_of_the_page_runs(folder: Path) -> None:
    page = (ROOT / "docs" / "libraries.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    script = script.replace("path/of/a/llama", str(folder / "llama"))
    done = run(script, None, folder=folder, timeout=250)
    assert len(re.findall(r"^4\.\d+$", done.logs[0], re.MULTILINE)) == 3
